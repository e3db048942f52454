"""Layer kinds: cost of each sublayer; see :mod:`megatron_epp.cost.kinds.layer`."""
