"""Basic functions of a job: flags, process groups, cost, Megatron's model and data, exit."""
