"""Features of Megatron that are not supported: a table, and functions that refuse the features."""
