"""Number of layers that each stage recomputes per chunk: ILP, hill climbing, offload."""
