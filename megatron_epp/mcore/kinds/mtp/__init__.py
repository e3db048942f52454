"""Prediction of further tokens (multi-token prediction): depths behind the decoder."""
