"""Patches of Megatron at run time (patch points), and set-up of CPU-only and CUDA hosts."""
