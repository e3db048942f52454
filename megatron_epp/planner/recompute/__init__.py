"""How many layers each stage recomputes for each chunk: ILP, local search, offload."""
