"""Sliding-window attention and attention sinks."""
