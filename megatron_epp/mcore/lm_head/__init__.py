"""LM head: fused head and loss; vocabulary parallelism with its shards, messages, and ops H and G."""
