"""Experts in chunks: the chunk that a layer runs now, and how balanced its routers are."""
