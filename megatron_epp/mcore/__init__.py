"""Code that imports Megatron: flags, data, layer kinds, schedule, patches, CPU-only host."""
