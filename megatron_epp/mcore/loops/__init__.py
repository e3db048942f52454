"""Elastic pipelines in training loops of others: whole micro-batches, or slices of documents."""
