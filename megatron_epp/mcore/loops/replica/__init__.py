"""Replica of an external training loop: process groups, plans and exchanges between its ranks."""
