"""Quantised operands: scales of blocks and of whole tensors, and primary weights in fp8."""
