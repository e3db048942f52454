"""The certificate of a trainer: gradients of random plans against a plain model's."""
