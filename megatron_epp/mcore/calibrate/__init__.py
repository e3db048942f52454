"""`profile`: seconds and bytes of this host's layers, measured into a cost-model file."""
