"""Executes a plan: torch.distributed only, no planning and no Megatron."""
