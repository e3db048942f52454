"""`certify --loop` with Megatron: ranks of a training loop, and the reference model."""
