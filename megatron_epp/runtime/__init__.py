"""Executor of plans on torch.distributed; it imports neither the planner nor Megatron."""
