"""Training frameworks that call Megatron's schedule, a folder each.

shapes.py     rows and documents of its micro-batches, from its own rules of padding
slices.py     its adapter for slices, where it has one; the only file that needs mcore
settings.py   its settings for ``tune --for``, where it has them; without torch
"""
