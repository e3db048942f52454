"""Attention of chunks over cached K/V, on CPUs and GPUs."""
