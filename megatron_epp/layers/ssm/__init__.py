"""SSM and linear-attention layers: states carried over slice boundaries, and scans by heads."""
