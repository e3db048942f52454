"""Schedule of external training loops, in slices of documents."""
