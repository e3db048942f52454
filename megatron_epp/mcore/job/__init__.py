"""This job: its flags as read, process groups, Megatron's own model and data, and how it exits."""
