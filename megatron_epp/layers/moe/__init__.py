"""MoE on chunks: the chunk that a layer runs now, and load balancing of routers."""
