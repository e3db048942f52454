"""Conversion of documents to chunks: slicing, bin packing, and their parameters."""
