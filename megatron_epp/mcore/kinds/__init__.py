"""Kinds of layers in Megatron: what each part of a layer does there (registry.py)."""
