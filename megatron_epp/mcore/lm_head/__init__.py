"""LM head: fused head and loss, vocabulary parallelism (shards, messages, the ops H and G)."""
