"""Processes of `certify --loop` with Megatron: ranks of a training loop, and a reference model."""
