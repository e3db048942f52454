"""Definition of the ``--epp`` flags, and a table of Megatron's flags without effect under --epp."""
