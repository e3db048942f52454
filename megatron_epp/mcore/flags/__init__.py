"""Meaning of the ``--epp`` flags, and which of Megatron's flags a plan replaces."""
