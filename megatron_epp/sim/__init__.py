"""Plays a plan: start and stop of every op, and the bytes alive on every stage."""
