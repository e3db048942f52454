"""Megatron's mixture of experts in chunks: routers that count documents, and what they leave."""
