"""Choices for flags set to ``auto``, made once per run before Megatron builds the model."""
