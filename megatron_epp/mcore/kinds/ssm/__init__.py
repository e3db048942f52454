"""Megatron's layers with a state on chunks: Mamba-2 and the gated delta net."""
