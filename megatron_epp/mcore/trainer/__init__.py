"""Megatron's trainer with ``--epp``: entry, setup, and the schedule that replaces Megatron's."""
