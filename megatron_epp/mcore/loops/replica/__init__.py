"""A replica of an external training loop: its groups, its plans, the exchange between its ranks."""
