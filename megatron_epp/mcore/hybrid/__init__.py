"""Layer patterns of Megatron's HybridModel: a layer is attention, an MLP or another mixer."""
