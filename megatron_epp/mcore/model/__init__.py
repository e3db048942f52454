"""Megatron's model on chunks: hooks, attention, split backward, fused LM head."""
