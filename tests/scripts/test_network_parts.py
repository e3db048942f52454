"""What networks between nodes are built of: the direction of what RailX's abstract says."""

import sys
from pathlib import Path

import pytest

from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.network.topology import Network, Topology

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))

from network_parts import Parts, network_parts


def fabric(between: str, size: tuple[int, int]) -> Topology:
    return Topology("fabric", 1, "switch", between, 1.0, size)


def test_levels_of_a_fat_tree_grow_with_its_nodes() -> None:
    assert network_parts(fabric("fat-tree", (8, 8))) == Parts(2, 1, 0)  # one switch of 64 ports
    assert network_parts(fabric("fat-tree", (5, 13))) == Parts(4, 3, 0)
    assert network_parts(fabric("fat-tree", (64, 64))) == Parts(6, 5, 0)
    assert network_parts(fabric("fat-tree", (8, 8)), radix=8) == Parts(6, 5, 0)
    assert network_parts(fabric("torus", (64, 64))) == Parts(1, 0, 0)


@pytest.mark.parametrize("circuit_port", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("transceiver", [0.5, 1.0, 2.0])
def test_rails_cost_less_than_a_fat_tree_for_what_they_carry(
    transceiver: float, circuit_port: float
) -> None:
    """4,096 nodes, where a port of a circuit switch costs no more than one of a packet switch.

    For the bandwidth of rings less than a quarter, for that of all-to-all less than half: the
    abstract says a tenth and a half, of prices that it does not have.
    """
    price, ring, all_to_all = {}, {}, {}
    for between in ("fat-tree", "all-to-all"):
        topology = fabric(between, (64, 64))
        network = Network.of(topology, DEVICES["h100-80g"])
        price[between] = network_parts(topology).price(transceiver, 1.0, circuit_port)
        ring[between] = network.ring(4096)
        all_to_all[between] = network.all_to_all(4096)

    def ratio(carried: dict[str, float]) -> float:
        return (price["all-to-all"] / carried["all-to-all"]) / (
            price["fat-tree"] / carried["fat-tree"]
        )

    assert ratio(ring) < 1 / 4
    assert ratio(all_to_all) < 1 / 2
    assert ratio(ring) < ratio(all_to_all)
