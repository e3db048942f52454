"""How stages come to speak with each other before the first plan."""

from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_epp.ir import Message, Payload
from megatron_epp.runtime import link
from megatron_epp.runtime.link import Links, connect, message_device
from tests.certify.comm_recorder import Traffic
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
    """Both ends of a link take it in the same place: link after link, activations first; H's
    go round."""
    results = world.run(STAGES, connected, tmp_path)
    messages = [result[0] for result in results]
    assert messages == [
        [
            ("send", "ACTIVATION", 1),
            ("receive", "GRADIENT", 1),
            ("send", "HEAD", 1),
            ("receive", "HEAD", 2),
        ],
        [
            ("receive", "ACTIVATION", 0),
            ("send", "GRADIENT", 0),
            ("receive", "HEAD", 0),
            ("send", "ACTIVATION", 2),
            ("receive", "GRADIENT", 2),
            ("send", "HEAD", 2),
        ],
        [
            ("receive", "ACTIVATION", 1),
            ("send", "GRADIENT", 1),
            ("receive", "HEAD", 1),
            ("send", "HEAD", 0),
        ],
    ]
    assert all("initialised with a device_id" in result[1] for result in results)


def test_one_stage_has_nobody_to_speak_with() -> None:
    connect({}, 0, 1, CPU)


# ------------------------------------------------------------------ ranks that share a GPU


def through_the_host(rank: int, staged: bool) -> tuple[list[str], list[list[float]], int]:
    """Two messages each way, of tensors that their sender overwrites as soon as they are sent; this
    device stands for a GPU where ``staged``."""
    groups = {payload: dist.new_group() for payload in Payload}
    places = [str(message_device(groups[Payload.ACTIVATION], torch.device(d))) for d in _DEVICES]
    here = torch.device("cpu", 0)  # another than the host's by its name
    with patch.object(link, "message_device", lambda group, device: CPU if staged else device):
        links = Links(groups, lambda message: (message.chunk + 2, 3), torch.float64, here)
    way = (Payload.ACTIVATION, Payload.GRADIENT)[rank]
    back = (Payload.GRADIENT, Payload.ACTIVATION)[rank]
    coming = [Message(back, chunk, 1 - rank, rank) for chunk in range(2)]
    buffers = []
    for message in coming:
        links.post(message)
        buffers.append(links._posted[message.link][-1].tensor.data_ptr())
    for chunk in range(2):
        made = torch.full((chunk + 2, 3), 10.0 * rank + chunk, dtype=torch.float64)
        links.send(Message(way, chunk, rank, 1 - rank), made)
        if staged:
            made.fill_(-1)
    got = [links.receive(message) for message in coming]
    same = sum(tensor.data_ptr() == buffer for tensor, buffer in zip(got, buffers, strict=True))
    links.finish()
    dist.barrier()
    return places, [tensor.unique().tolist() for tensor in got], same


_DEVICES = ("cuda:0", "cuda:1", "cpu")


def test_gloo_carries_a_gpus_messages_through_the_hosts_memory(tmp_path) -> None:
    for staged in (False, True):
        folder = tmp_path / str(staged)
        folder.mkdir()
        results = world.run(2, through_the_host, folder, staged)
        for rank, (places, values, same) in enumerate(results):
            assert places == ["cpu"] * 3
            assert values == [[10.0 * (1 - rank)], [10.0 * (1 - rank) + 1]]
            assert same == (0 if staged else 2)  # buffers of the host are copied out of
