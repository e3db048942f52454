"""Seams: attributes of Megatron that are replaced, by name, and what a host without a GPU needs."""
