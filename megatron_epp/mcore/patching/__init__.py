"""What is replaced in Megatron, by name, and what a host without a GPU needs."""
