"""Adapters of slicing mode for micro-batches of common forms."""
