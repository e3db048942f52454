"""Mixture of experts (MoE): load balancing by document, expert activations, token dispatch."""
