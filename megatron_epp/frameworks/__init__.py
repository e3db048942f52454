"""Training frameworks that call Megatron's schedule, one folder per framework.

shapes.py   rows and documents of the framework's micro-batches, by its padding rules
slices.py   adapter for slicing mode, if it is supported; the only file that imports mcore
"""
