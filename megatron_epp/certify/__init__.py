"""Certificates: gradients of random plans compared with those of a reference model."""
