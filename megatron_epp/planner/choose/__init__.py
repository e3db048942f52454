"""Choices made once per run: layers of every stage, placement, vocabulary parallelism."""
