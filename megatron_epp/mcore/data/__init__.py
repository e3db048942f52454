"""Data: from Megatron's indexed datasets to the tensors of a chunk."""
