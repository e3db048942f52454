"""Unsupported features: one table, and the refusals by it."""
