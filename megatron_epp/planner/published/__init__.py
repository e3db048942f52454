"""Published schedules, each under its paper's name, as plans for a job's stages and ranks."""
