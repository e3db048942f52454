"""Multi-token prediction (MTP): layers after the decoder layers."""
