"""`certify` with Megatron: its ranks under test, and its plain model."""
