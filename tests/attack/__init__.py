"""Failures of a job's processes and nodes, for scripts/failures.py, restarts.py and struck jobs."""
