"""Plans of the calls of other people's loops: order and slices, by seconds measured before."""
