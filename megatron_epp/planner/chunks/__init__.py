"""Documents to chunks: slicing, bin packing, and their parameters."""
