"""Simulator: start and stop of every op of a plan, and the bytes on every rank."""
