"""Coefficients of a profile from measurements."""
