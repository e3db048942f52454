"""Data pipeline that converts documents of Megatron's indexed datasets to tensors of chunks."""
