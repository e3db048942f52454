"""`certify` with Megatron: its ranks under test, and its reference model."""
