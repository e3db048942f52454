"""Weight gradients deferred from I to W, for Megatron's and Transformer Engine's linears."""
