"""Pipeline planners to compare with: packing, seq1f1b, chunkflow."""
