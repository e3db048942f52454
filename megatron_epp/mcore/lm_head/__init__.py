"""LM head: the fused LM head and loss, and vocabulary parallelism with the ops H and G."""
