"""Layers that carry a state from token to token: over the borders between slices, and by heads."""
