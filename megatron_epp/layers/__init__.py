"""Layers on chunks: attention over cached K/V, recompute and split backward."""
