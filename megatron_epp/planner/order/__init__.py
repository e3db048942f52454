"""Chunks to the order of ops on every stage: problem, list scheduler, policies."""
