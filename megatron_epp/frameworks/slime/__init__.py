"""slime, and miles, which has its micro-batches."""
