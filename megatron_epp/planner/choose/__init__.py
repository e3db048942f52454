"""Choices made once per run: layers of every stage, placement, vocabulary parallelism."""

FIRST_BATCHES = 2  # of the corpus, that a choice is made on
