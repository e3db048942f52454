"""How stages come to speak with each other before the first plan."""

import torch
import torch.distributed as dist

from megatron_epp.ir import Payload
from megatron_epp.runtime.comm_recorder import Traffic
from megatron_epp.runtime.link import connect
from tests.runtime import world

STAGES = 3
CPU = torch.device("cpu")


def connected(rank: int) -> tuple[list[tuple[str, str, int]], str]:
    groups = {payload: dist.new_group(group_desc=payload.name) for payload in Payload}
    with Traffic() as traffic:
        connect(groups, rank, STAGES, CPU)
    messages = [(message.way, message.group, message.peer) for message in traffic.messages]
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    try:
        connect(groups, rank, STAGES, CPU)
    except ValueError as error:
        return messages, str(error)
    return messages, ""


def test_every_link_is_used_once_in_an_order_without_a_circle(tmp_path) -> None:
    """Both ends of a link take it in the same place: link after link, activations first."""
    results = world.run(STAGES, connected, tmp_path)
    messages = [result[0] for result in results]
    assert messages == [
        [("send", "ACTIVATION", 1), ("receive", "GRADIENT", 1)],
        [
            ("receive", "ACTIVATION", 0),
            ("send", "GRADIENT", 0),
            ("send", "ACTIVATION", 2),
            ("receive", "GRADIENT", 2),
        ],
        [("receive", "ACTIVATION", 1), ("send", "GRADIENT", 1)],
    ]
    assert all("initialised with a device_id" in result[1] for result in results)


def test_one_stage_has_nobody_to_speak_with() -> None:
    connect({}, 0, 1, CPU)
