"""Communication of devices: where they lie, and what replicas exchange."""
