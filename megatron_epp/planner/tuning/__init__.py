"""Search for the fastest layout of a job: degrees, layers per stage, vocabulary parallelism."""
