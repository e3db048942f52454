"""Mixture of experts (MoE): routers that balance over documents, experts, exchange of tokens."""
