"""Measurement of the model's layers on this host: seconds and bytes for the cost model."""
