"""Number of layers that each stage recomputes or offloads per chunk: ILP, hill climbing."""
