"""LM head on chunks: vocabulary shards, fused head and loss, log-probabilities."""
