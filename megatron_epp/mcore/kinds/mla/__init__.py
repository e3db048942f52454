"""Multi-latent attention (MLA)."""
