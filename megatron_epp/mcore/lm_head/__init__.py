"""The output layer with its words over the stages: shards, messages, and the ops H and G."""
