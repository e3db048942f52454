"""Which layout of a job is fastest: tensor, context, pipeline and data parallel, and what else."""
