"""Recompute of whole layers or parts of them during a chunk's backward."""
