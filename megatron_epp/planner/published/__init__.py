"""Planners that follow published schedules; each planner has the name of its paper's method."""
