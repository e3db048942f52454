"""Documents to chunks: slicing, bin packing, and the parameters that steer both."""
