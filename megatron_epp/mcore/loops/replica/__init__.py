"""A replica in a loop of others: its groups, its plans, and what its ranks tell each other."""
