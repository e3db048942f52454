"""Attention over heads (MHA, GQA, MQA)."""
