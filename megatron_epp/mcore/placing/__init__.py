"""Placement of stages on ranks: the flags, and Megatron's model chunks on each rank."""
