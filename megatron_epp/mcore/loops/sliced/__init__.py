"""Level 1: slices of documents in loops of others."""
