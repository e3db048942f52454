"""slime, and miles, whose micro-batches have the same form."""
