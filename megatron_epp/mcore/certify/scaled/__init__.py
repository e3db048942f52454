"""Parts of a model made small: its experts, and which of its layers are kept."""
