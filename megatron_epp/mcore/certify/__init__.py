"""Processes of `certify` with Megatron: the ranks under test, and the reference model."""
