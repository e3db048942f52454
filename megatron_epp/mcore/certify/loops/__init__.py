"""`certify --loop` with Megatron: ranks of a training loop, and its reference model."""
