"""Megatron's model on chunks: layer patches, attention kernels, fp8, stages, split backward."""
