"""Fits of a profile's coefficients to measurements."""
