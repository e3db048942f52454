"""Published schedules, each under its paper's name, as plans that a job's stages and ranks run."""
