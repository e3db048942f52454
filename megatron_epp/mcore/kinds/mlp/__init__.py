"""The dense MLP."""
