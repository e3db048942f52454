"""Layer patterns of Megatron's HybridModel: a layer is one sublayer (attention, MLP, SSM, ...)."""
