"""Training frameworks that call Megatron's schedule, a folder each.

shapes.py     rows and documents of its micro-batches, by its own rules of padding
slices.py     its adapter of slicing mode, if it has one; the only file that needs mcore
settings.py   its settings for ``tune --for``, if it has any; without torch
"""
