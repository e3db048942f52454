"""Several stages on a rank, in simulation only: the baselines `adaptis` and `slimpipe`."""
