"""What devices say to each other: where they lie, and what replicas exchange."""
