"""Features that do not run: one table, and who refuses by it."""
