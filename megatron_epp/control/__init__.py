"""Control of iterations: plans, memory budgets, retries, comparison of predictions with times."""
