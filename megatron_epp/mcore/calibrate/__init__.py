"""Measurement of a cost model (`profile`): seconds and bytes of this host's layers, in a file."""
