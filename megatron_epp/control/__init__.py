"""The loop around an iteration: plans, budgets, retry, predicted against measured. No Megatron."""
