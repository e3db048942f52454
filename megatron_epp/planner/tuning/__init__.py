"""Search for the fastest layout of a job: degrees of parallelism, layers of stages, vocabulary."""
