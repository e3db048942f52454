"""Search for a job's fastest layout: parallel degrees, layers per stage, vocabulary parallelism."""
