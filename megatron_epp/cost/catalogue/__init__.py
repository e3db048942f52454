"""Catalogue of models and devices, by name or from a user's file."""
