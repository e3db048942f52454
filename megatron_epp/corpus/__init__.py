"""Lengths of documents: index files, overlong documents, reading order. numpy only."""
