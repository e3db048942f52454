"""What the ``--epp`` flags mean, and which of Megatron's flags a plan replaces."""
