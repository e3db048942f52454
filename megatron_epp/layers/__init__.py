"""Attention over kept K/V and recompute inside layers: what a chunk needs of a layer."""
