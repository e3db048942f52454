"""`certify --loop`: training loops of others against the plain model."""
