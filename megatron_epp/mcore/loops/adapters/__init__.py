"""Adapters for micro-batches of common forms: slices of them without a word of one's own."""
