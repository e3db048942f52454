"""Several stages on a device, in simulation only: the baselines `adaptis` and `slimpipe`."""
