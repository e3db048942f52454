"""Networks: topologies, failed nodes and links, and the rates of collectives."""
