"""Layer patterns of Megatron's HybridModel; each layer is an attention, an MLP or another mixer."""
