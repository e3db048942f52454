"""Choices that flags leave to ``auto``, made once per run before Megatron builds the model."""
