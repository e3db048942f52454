"""slime, and miles, which has the same micro-batches."""
