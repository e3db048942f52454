"""Where Megatron is taken hold of: flags, data, forward step, schedule, seams, and the CPU host."""
