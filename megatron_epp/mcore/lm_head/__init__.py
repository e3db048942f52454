"""LM head: fused head and loss; shards, messages and the ops H and G of vocabulary parallelism."""
