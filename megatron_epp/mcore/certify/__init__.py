"""`certify`: gradients of random plans against the plain model."""
