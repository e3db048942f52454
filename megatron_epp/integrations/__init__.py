"""Micro-batches of frameworks that call Megatron's schedule: their rows and documents, by name."""
