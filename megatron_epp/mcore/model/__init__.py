"""Where Megatron's model runs a chunk: hooks, attention, split backward, early head."""
