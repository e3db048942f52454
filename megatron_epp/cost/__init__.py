"""Cost model: seconds and bytes of a chunk on a stage."""
