"""The ``epp`` planner: a bounded search over chunks, order and recompute."""
