"""Kinds of layers: what each part of a layer takes; see :mod:`megatron_epp.cost.kinds.layer`."""
