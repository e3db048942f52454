"""Seconds and bytes of a chunk on a stage."""
