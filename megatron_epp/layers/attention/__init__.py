"""Attention of chunks over kept K/V, on CPUs and GPUs."""
