"""Definition of the ``--epp`` flags, and Megatron's flags that a plan replaces."""
