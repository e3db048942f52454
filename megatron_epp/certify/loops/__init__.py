"""Certificates of external training loops, by their own micro-batches and a reference model."""
