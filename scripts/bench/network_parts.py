"""Parts of a network between nodes, counted per link of a node, to compare prices."""

import sys
from dataclasses import dataclass

from headline import ROOT

sys.path.insert(0, str(ROOT))

from megatron_epp.cost.network.rails import TORUS
from megatron_epp.cost.network.topology import FAT_TREE, SWITCH, Topology

RADIX = 64  # ports of a packet switch


@dataclass(frozen=True, slots=True)
class Parts:
    """Numbers of parts for one port of a node, all with the rate of the port.

    transceivers    transceivers at both ends of optical links; a circuit switch has none
    packet_ports    ports of electrical packet switches
    circuit_ports   ports of optical circuit switches
    """

    transceivers: int
    packet_ports: int
    circuit_ports: int

    def price(self, transceiver: float, packet_port: float, circuit_port: float) -> float:
        """Return the total price, in the unit of the prices of the parts."""
        return (
            self.transceivers * transceiver
            + self.packet_ports * packet_port
            + self.circuit_ports * circuit_port
        )


def network_parts(topology: Topology, radix: int = RADIX) -> Parts:
    """Return the numbers of parts for one port of a node.

    A fat tree of n nodes without oversubscription has the fewest levels L such that 2 (radix / 2)^L
    is at least n. The way of a byte to the top has L links and 2 L - 1 ports. Rails between circuit
    switches are fibres: a port of the node, and one of the switch.
    """
    if topology.between == TORUS:
        return Parts(1, 0, 0)
    if topology.between not in (SWITCH, FAT_TREE):
        return Parts(1, 0, 1)
    rows, columns = topology.nodes
    levels = 1
    while 2 * (radix // 2) ** levels < rows * columns:
        levels += 1
    return Parts(2 * levels, 2 * levels - 1, 0)
