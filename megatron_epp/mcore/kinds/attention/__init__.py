"""Multi-head attention (MHA, GQA, MQA)."""
