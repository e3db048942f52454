"""Figures of a profile from measurements."""
