"""Choices made once per run: layers per stage, placement, vocabulary parallelism."""

FIRST_BATCHES = 2  # number of batches of the corpus that choices are made on
