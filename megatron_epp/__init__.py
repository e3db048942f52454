"""Elastic Pipeline Parallelism for Megatron-LM: plans made for the documents of every iteration."""
