"""Patch points: attributes of Megatron that are replaced, and what CPU-only and CUDA hosts need."""
