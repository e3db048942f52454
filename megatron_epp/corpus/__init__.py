"""Lengths of documents: index files, overlong documents and reading order."""
