"""Megatron's HybridModel: layers that are attention or MLP alone, in the order of a pattern."""
