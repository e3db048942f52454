"""Quantised operands: scales of blocks and of whole tensors, and weights held in fp8."""
