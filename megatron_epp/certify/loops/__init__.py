"""Certificates of external training loops: plans for their micro-batches, and a reference model."""
