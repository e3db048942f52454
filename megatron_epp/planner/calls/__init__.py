"""Plans of calls: in which order, cut or whole, by seconds measured before."""
