"""Schedules for external training loops: scheduling mode (whole micro-batches), slicing mode."""
