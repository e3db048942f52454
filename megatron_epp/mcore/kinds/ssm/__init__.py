"""SSM and linear-attention layers: Mamba-2, gated delta net."""
