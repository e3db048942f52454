"""Where groups lie, and what they get there."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from megatron_epp.cost.build import named_cost
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.network.topology import TOPOLOGIES, Network, Topology, distinct, topology
from megatron_epp.ir import Kind

H100 = DEVICES["h100-80g"]
NODES = Network.of(TOPOLOGIES["nodes"], H100)
RING = H100.tensor_bytes_per_second[2]
A100 = DEVICES["a100-80g"]
A100_NODES = Network.of(TOPOLOGIES["nodes"], A100)


def test_a_group_inside_a_node_has_the_rate_of_its_size() -> None:
    """What leaves a device goes over the wire; the rest stays."""
    wire = H100.group_bytes_per_second[2]
    assert NODES.all_to_all(8) == pytest.approx(wire * 8 / 7)
    assert NODES.all_to_all(4, stride=2) == pytest.approx(wire * 4 / 3)
    assert A100_NODES.all_to_all(8) == A100.group_bytes_per_second[8]  # all bytes, copies included
    assert NODES.placed(4, 2) == (4, 1)


def test_whole_nodes_have_the_measured_rate() -> None:
    assert A100_NODES.all_to_all(16) == pytest.approx(A100.group_bytes_per_second[16])
    assert A100_NODES.all_to_all(32) == pytest.approx(A100.group_bytes_per_second[32])
    # Not measured: half of the bytes leave the node over the device's part of its link.
    assert NODES.all_to_all(16) == pytest.approx(2 * H100.link_bytes_per_second / 8)


def test_copies_before_and_after_an_exchange_take_the_devices_own_memory() -> None:
    rate = H100.memory_efficiency * H100.memory_bytes_per_second
    assert NODES.copy_seconds(1e9) == pytest.approx(4e9 / rate)
    assert A100_NODES.copy_seconds(1e9) == 0


def test_gathers_have_a_latency_that_grows_with_the_group() -> None:
    assert [NODES.gather_latency(size) for size in (2, 4, 8, 16)] == [27e-6, 33e-6, 45e-6, 45e-6]
    assert A100_NODES.gather_latency(8) == 0
    (one,) = named_cost("llama3-8b", "h100-80g", pp=1, tp=8).layout.coefficients
    assert one.tensor_gathers == 4  # around attention and around the MLP
    made = named_cost("llama3-8b", "h100-80g", pp=1, tp=8, topology="nodes")
    constants = made.seconds.communication_per(Kind.FORWARD)[0, 2]
    assert constants == pytest.approx(32 * 4 * 45e-6)


def test_flex_sends_a_token_once_to_a_node_and_a_device() -> None:
    """Eight of 16 devices on two nodes: 4 copies leave by alltoall, with flex one, nearly."""
    assert distinct(2, 8) == pytest.approx(2 * (1 - 0.5**8))
    away = H100.link_bytes_per_second / 8
    assert NODES.dispatch_seconds(1e6, 8, 16, once=False) == pytest.approx(8e6 / 2 / away)
    assert NODES.dispatch_seconds(1e6, 8, 16, once=True) == pytest.approx(
        max(1e6 * distinct(2, 8) / 2 / away, 1e6 * distinct(16, 8) * 7 / 8 / 430e9)
    )
    inside = NODES.dispatch_seconds(1e6, 8, 8, once=False)
    assert inside == pytest.approx(8e6 * 7 / 8 / H100.group_bytes_per_second[2])
    how = {"pp": 1, "ep": 8, "dp": 8, "topology": "nodes", "memory_budget_gib": 1e4}
    all_copies, once = (
        named_cost("qwen3-30b-a3b", "h100-80g", moe_token_dispatcher_type=each, **how)
        for each in ("alltoall", "flex")
    )
    exchanged = [each.seconds.communication_per(Kind.FORWARD)[0, 0] for each in (all_copies, once)]
    assert exchanged[1] == pytest.approx(exchanged[0] * distinct(8, 8) / 8)


def test_a_small_group_whose_members_lie_on_different_nodes_is_slow() -> None:
    """cp 4 with tp 8: a member on each of four nodes, though the group's size would fit one."""
    assert NODES.placed(4, 8) == (1, 4)
    assert NODES.all_to_all(4, stride=8) < H100.group_bytes_per_second[2] / 4
    # cp 2 sends half of its bytes away, cp 4 three quarters.
    assert NODES.all_to_all(4, stride=8) < NODES.all_to_all(2, stride=8)


def test_tensor_parallelism_has_nvlinks_rate_inside_a_node_and_the_links_across() -> None:
    assert NODES.ring(8) == RING
    assert NODES.ring(16) == pytest.approx(min(RING, H100.link_bytes_per_second))
    assert NODES.ring(2, stride=8) == pytest.approx(H100.link_bytes_per_second / 8)


def test_a_mesh_is_slower_for_all_to_alls_and_not_for_rings() -> None:
    railx = Network.of(TOPOLOGIES["railx"], H100)
    assert railx.node_devices == 16
    assert railx.all_to_all(16) == pytest.approx(H100.group_bytes_per_second[2] / 4 * 16 / 15)
    assert railx.ring(16) == NODES.ring(8)
    # Seven nodes on three rings of rails that join every pair: as by a switch, nearly.
    switch = Network.of(Topology("switch", 16, "mesh"), H100)
    assert railx.all_to_all(7 * 16) == pytest.approx(switch.all_to_all(7 * 16))
    assert railx.all_to_all(8 * 16) == pytest.approx(switch.all_to_all(8 * 16) * 7 / 8)


def test_neighbouring_stages_share_a_node_only_where_the_whole_job_does() -> None:
    assert NODES.to_neighbour(4, replicas=1, stages=2) == 4 * RING
    assert NODES.to_neighbour(4, replicas=2, stages=2) == 4 * H100.link_bytes_per_second / 8
    assert NODES.to_neighbour(8, replicas=1, stages=4) == H100.link_bytes_per_second
    assert NODES.to_neighbour(32, replicas=1, stages=4) == 4 * H100.link_bytes_per_second


def seconds(**how) -> float:
    cost = named_cost("llama3-70b", "h100-80g", pp=8, **how)
    return float(cost.seconds.communication_per(Kind.FORWARD)[3, 0])


def test_the_cost_of_a_layout_follows_its_groups_places() -> None:
    flat, nodes = (seconds(tp=8, cp=1, topology=name) for name in ("flat", "nodes"))
    by_size = named_cost("llama3-70b", "h100-80g", pp=8, tp=8).layout.profile
    assert nodes == pytest.approx(flat * by_size.tensor_bytes_per_second[8] / RING)
    inside = seconds(tp=1, cp=4, topology="nodes", memory_budget_gib=1000)
    assert inside == pytest.approx(seconds(tp=1, cp=4, topology="flat", memory_budget_gib=1000))
    cost = named_cost("llama3-70b", "h100-80g", pp=8, tp=8, cp=4, topology="nodes")
    (figures,) = cost.layout.coefficients
    assert cost.layout.network is not None
    moved = figures.all_to_all_bytes_per_token / 32
    moved = moved / cost.layout.network.all_to_all(4, 8) + cost.layout.network.copy_seconds(moved)
    gathers = figures.tensor_bytes_per_token * 7 / 8 / 4 / RING
    layers = cost.layout.layers[3]
    assert cost.seconds.communication_per(Kind.FORWARD)[3, 0] == pytest.approx(
        layers * (moved + gathers)
    )


GRID = {"name": "mine", "between": "all-to-all", "nodes": [2, 3]}


def test_the_page_describes_every_key_and_its_file_is_one(tmp_path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "topologies.md").read_text()
    (example,) = re.findall(r"```json\n(.*?)```", page, re.S)
    file = tmp_path / "hall.json"
    file.write_text(example)
    read = topology(str(file))
    assert read is not None and read.failed_nodes == ((3, 5),)
    table = page.split("| key | default | meaning |")[1].split("\n\n")[0]
    keys = re.findall(r"^\| `(\w+)` \|", table, re.M)
    assert keys == [field.name for field in dataclasses.fields(Topology)]


def test_topologies_by_name_and_by_file(tmp_path) -> None:
    assert topology("flat") is None
    with pytest.raises(ValueError, match="unknown topology 'node'; did you mean nodes"):
        topology("node")
    file = tmp_path / "mine.json"
    file.write_text('{"name": "mine", "node_devices": 4, "inside": "mesh"}')
    assert topology(str(file)) == Topology("mine", 4, "mesh")
    holes = {"failed_nodes": ["e", [0, 0]], "hosts": list("abcdef")}
    file.write_text(json.dumps(GRID | holes))
    read = topology(str(file))
    assert read is not None
    assert read.failed_nodes == ((1, 1), (0, 0))
    assert read.live == [(0, 1), (0, 2), (1, 0), (1, 2)]
    assert [read.host(place) for place in read.live] == list("bcdf")
    assert topology(str(file)) == read == dataclasses.replace(read)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"inside": "torus"}, "inside 'torus': expected switch or mesh"),
        ({"between": "rings"}, "between 'rings': expected switch or all-to-all"),
        ({"node_devices": -1}, "node_devices -1: expected from 0"),
        ({"node_devices": 1.5}, "node_devices 1.5: expected a whole number"),
        ({"link_bytes_per_second": "fast"}, "link_bytes_per_second 'fast': expected a number"),
        ({"nodes": [2]}, r"nodes \[2\]: expected \[rows, columns\]"),
        ({"nodes": [2, True]}, "nodes: columns True: expected a whole number"),
        ({"nodes": 6}, "nodes 6: expected a list"),
        ({"nodes": [1 << 9, 1 << 9]}, "expected at most 65536 in all"),
        ({"nodes": [], "used": [1, 1]}, "used: expected nodes, the rows and columns"),
        ({"used": [3, 3]}, "used: rows 3: expected from 1 to 2"),
        ({"column_load": 0.5}, "column_load 0.5: expected from 1 to"),
        ({"hosts": ["a"]}, "hosts: 1 names; expected 6, one for every node of 2 x 3"),
        ({"hosts": list("abcdea")}, r"hosts\[5\] 'a': is there twice, first as hosts\[0\]"),
        ({"hosts": ["a b", *"cdefg"]}, "expected a name without blanks"),
        (
            {"failed_nodes": [[1, 2], [0, 0], [1, 2]]},
            r"failed_nodes\[2\] \[1, 2\]: is there twice, first as failed_nodes\[0\]",
        ),
        ({"failed_nodes": [[2, 0]]}, r"failed_nodes\[0\] \[2, 0\]: there is no such node"),
        ({"failed_nodes": ["x"]}, r"failed_nodes\[0\] 'x': there is no such node"),
        ({"failed_nodes": [[0, True]]}, "there is no such node"),
        (
            {"failed_nodes": [[row, column] for row in (0, 1) for column in (0, 1, 2)]},
            "failed_nodes: all 6 nodes failed; expected one at least",
        ),
        ({"failed_links": []}, "unknown field 'failed_links'; did you mean failed_nodes"),
    ],
)
def test_what_a_grid_refuses_in_one_line(wrong: dict, said: str, tmp_path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(GRID | wrong))
    with pytest.raises(ValueError, match=said) as raised:
        topology(str(file))
    assert str(raised.value).startswith(f"topology file {file}: ")
    assert "\n" not in str(raised.value)


def test_a_group_larger_than_the_grid_is_refused() -> None:
    small = Network.of(Topology("small", 8, between="all-to-all", nodes=(2, 2)), H100)
    assert small.all_to_all(32) > 0
    with pytest.raises(ValueError, match="a group of 8 nodes, 1 apart: the topology has 4 nodes"):
        small.all_to_all(64)


def test_another_size_of_node_is_not_the_measured_one() -> None:
    four = Network.of(dataclasses.replace(TOPOLOGIES["nodes"], node_devices=4), H100)
    assert not four.across_bytes_per_second
    assert four.all_to_all(8) == pytest.approx(2 * H100.link_bytes_per_second / 4)
