"""External training loops: scheduling mode (whole micro-batches) and slicing mode."""
