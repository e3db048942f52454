"""Stages placed on ranks: what flags ask for, and Megatron's parts of the model for it."""
