"""Schedules for external training loops: whole micro-batches, or slices of documents."""
