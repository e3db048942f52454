"""Recompute of layers or sublayers during a chunk's backward."""
