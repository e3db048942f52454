"""`certify --loop` with Megatron: ranks of a training loop, and its plain model."""
