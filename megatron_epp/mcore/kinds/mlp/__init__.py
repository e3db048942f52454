"""Dense MLP."""
