"""The `infinipipe` planner, as published (arXiv 2509.21275)."""
