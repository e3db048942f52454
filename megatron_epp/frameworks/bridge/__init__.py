"""Megatron-Bridge: its micro-batches are samples, which mcore/loops/adapters/samples.py cuts."""
