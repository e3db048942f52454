"""The certificate of a training loop's own micro-batches against a plain model."""
