"""Lengths of documents: index files, overlong documents, reading order. Imports numpy only."""
