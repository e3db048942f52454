"""Plans for the calls of external training loops, based on times measured in earlier calls."""
