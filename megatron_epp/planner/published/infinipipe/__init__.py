"""The `infinipipe` planner, true to the paper (arXiv 2509.21275)."""
