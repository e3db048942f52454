"""Search for the fastest layout of a job: tensor, context, pipeline and data parallel, and what
else."""
