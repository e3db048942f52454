"""Number of layers that each stage recomputes or offloads for each chunk."""
