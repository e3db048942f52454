"""Training frameworks that call Megatron's schedule: ``slices.py`` of each is its adapter."""
