"""Layer kinds in Megatron: flags, modules and certificates of each (registry.py)."""
