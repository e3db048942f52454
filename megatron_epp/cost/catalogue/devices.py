"""Devices, and the links between them."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_epp.cost.catalogue.named import pick

# The most and, inverted, the least GiB that anybody means.
MOST_GIB = 1e6
GIB = 2**30
MOST_DEVICES = 1_000_000
# How --epp-memory-budget-gib of training and --memory-budget-gib of the other commands read alike.
BUDGET_HELP = (
    "memory budget of a device in GiB, model states included (on a CPU without them: what chunks "
    "hold between forward and backward); one number, or one for every pipeline rank"
)

# Least and most of each number, far around any machine: beyond, times leave what numbers can say.
_RATE = (1.0, 1e24)
_LIMITS: Mapping[str, tuple[float, float]] = {
    "budget_gib": (1e-3, 1e6),
    "linear_flops": _RATE,
    "attention_flops": _RATE,
    "launch_seconds": (0.0, 1e3),
    "link_bytes_per_second": _RATE,
    "link_latency_seconds": (0.0, 1e3),
    "node_devices": (1, MOST_DEVICES),
    "host_bytes_per_second": (0.0, 1e24),
    "memory_bytes_per_second": (0.0, 1e24),
}


def _number(name: str, value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} {value!r}: expected a number")
    if not least <= value <= most:
        limits = "a number above 0" if value <= 0 < least else f"from {least:g} to {most:g}"
        raise ValueError(f"{name} {value!r}: expected {limits}")
    return float(value)


def _by_size(name: str, table: Any) -> dict[int, float]:
    """Rates by group size; JSON has its sizes as texts."""
    if not isinstance(table, Mapping):
        raise ValueError(f"{name}: expected a rate by group size")
    rates = {}
    for size, rate in table.items():
        where = f"{name} of a group of {size!r}"
        devices = int(size) if str(size).isdecimal() else 0
        if not 2 <= devices <= MOST_DEVICES:
            raise ValueError(f"{where}: expected a size from 2 to {MOST_DEVICES}")
        rates[devices] = _number(where, rate, *_RATE)
    return rates


@dataclass(frozen=True, slots=True)
class Device:
    """A device, as far as an analytic profile takes something from it.

    budget_gib              what training may use: memory less a margin for context and fragments
    linear_flops            reached by matrix products, flops per second (not the data sheet's)
    attention_flops         reached by attention's kernels
    launch_seconds          per layer and chunk, forward; backward twice that
    group_bytes_per_second  all-to-all bandwidth of one device inside a group, by group size: the
                            first eight devices share a node
    link_bytes_per_second   between neighbouring stages, one direction, per node
    node_devices            devices of a node, which share its link
    link_latency_seconds    of one message
    host_bytes_per_second   between one device and its host's memory, one direction while the
                            other one is busy too; 0: none, or not known
    memory_bytes_per_second its own memory's; 0: not known, so that reading K and V costs nothing
    tensor_bytes_per_second of gathers and scatters inside a node, by group size, as nccl-tests
                            counts bus bandwidth; none: as all-to-all
    """

    name: str
    budget_gib: float
    linear_flops: float
    attention_flops: float
    launch_seconds: float
    group_bytes_per_second: Mapping[int, float]
    link_bytes_per_second: float
    link_latency_seconds: float
    node_devices: int = 8
    host_bytes_per_second: float = 0.0
    memory_bytes_per_second: float = 0.0
    tensor_bytes_per_second: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"device name {self.name!r}: expected a word")
        for name in ("group_bytes_per_second", "tensor_bytes_per_second"):
            object.__setattr__(self, name, _by_size(name, getattr(self, name)))
        if not self.group_bytes_per_second:
            raise ValueError("group_bytes_per_second: expected a rate for one size at least")
        for name, limits in _LIMITS.items():
            _number(name, getattr(self, name), *limits)
        if not isinstance(self.node_devices, int) or isinstance(self.node_devices, bool):
            raise ValueError(f"node_devices {self.node_devices!r}: expected a whole number")

    @property
    def budget_bytes(self) -> float:
        return self.budget_gib * GIB


# Bytes per second by group size, published by FlexSP for A100 nodes with two InfiniBand cards.
_A100_GROUPS = {2: 119.5e9, 4: 104.1e9, 8: 96.5e9, 16: 10.33e9, 32: 5.94e9, 64: 4.87e9}
# Hopper: NVLink of 900 GB/s against 600, eight cards of 400 Gb/s against two of 200: A100's
# coefficients in those ratios. An assumption; a measured profile replaces it.
_HOPPER_GROUPS = {2: 179e9, 4: 156e9, 8: 145e9, 16: 40e9, 32: 24e9, 64: 19e9}
# Gathers and scatters inside a node: nccl-tests' bus bandwidth on eight H100 is 350 GB/s (gather)
# and 360 (scatter; NVIDIA/nccl issue 1281), on eight A100 about 200 (NVIDIA/nccl-tests issue 149).
_A100_RINGS, _HOPPER_RINGS = {2: 200e9}, {2: 350e9}
# PCIe 4 and 5 with 16 lanes reach about 25 and 50 GB/s; less is taken, since a host's memory serves
# all devices of a node. An assumption: 20 is our study's, which says what 10 and 5 would change.
_PCIE_4, _PCIE_5 = 20e9, 40e9

# Budgets: 74 GiB of 80 is the study's (planning on A800-80GB); the others in the same share.
# Rates: A100's are what FlexSP's constants imply (212 and 179 Tflops of 312); Hopper's are taken
# at 60% of its 989 for products and 50% for attention; one core of a server reaches about 30
# Gflops in float32. Assumptions, all of them, unless a profile was measured. Memory's rates are the
# data sheets': read at that rate, K and V explain FlashAttention-3's published times
# (tests/cost/test_published_attention.py).
_A100 = (212e12, 179e12, 1e-4, _A100_GROUPS, 50e9, 1e-5, 8, _PCIE_4)
_HOPPER = (593e12, 495e12, 1e-4, _HOPPER_GROUPS, 400e9, 1e-5, 8, _PCIE_5)
# The same shares of the data sheets' dense bf16 rates: H800 is an H100 with 400 GB/s of NVLink, H20
# has 148 Tflops, B200 2,250 and NVLink of 1,800 GB/s, GB200 2,450 and NVLink over
# racks (64 of 72 devices counted), L40S 362 and PCIe 4 alone. Groups' rates in the ratio of links.
_H800_GROUPS = {2: 80e9, 4: 69e9, 8: 64e9, 16: 40e9, 32: 24e9, 64: 19e9}
_BLACKWELL_GROUPS = {2: 358e9, 4: 312e9, 8: 290e9, 16: 40e9, 32: 24e9, 64: 19e9}
_H800_RINGS, _BLACKWELL_RINGS, _PCIE_RINGS = {2: 156e9}, {2: 700e9}, {2: 20e9}
_H800 = (593e12, 495e12, 1e-4, _H800_GROUPS, 400e9, 1e-5, 8, _PCIE_5)
_H20 = (89e12, 74e12, 1e-4, _HOPPER_GROUPS, 400e9, 1e-5, 8, _PCIE_5)
_B200 = (1350e12, 1125e12, 1e-4, _BLACKWELL_GROUPS, 400e9, 1e-5, 8, _PCIE_5)
_GB200 = (1470e12, 1225e12, 1e-4, {2: 358e9, 4: 312e9, 8: 290e9}, 3200e9, 1e-5, 64, 200e9)
_L40S = (217e12, 181e12, 1e-4, {2: 20e9}, 200e9, 1e-5, 8, _PCIE_4)
DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device("a100-40g", 37.0, *_A100, 1.555e12, _A100_RINGS),
        Device("a100-80g", 74.0, *_A100, 2.039e12, _A100_RINGS),
        Device("h100-80g", 74.0, *_HOPPER, 3.35e12, _HOPPER_RINGS),
        Device("h200-141g", 130.0, *_HOPPER, 4.8e12, _HOPPER_RINGS),
        Device("h800-80g", 74.0, *_H800, 3.35e12, _H800_RINGS),
        Device("h20-96g", 89.0, *_H20, 4.0e12, _HOPPER_RINGS),
        Device("b200-180g", 166.0, *_B200, 8e12, _BLACKWELL_RINGS),
        Device("gb200-186g", 172.0, *_GB200, 8e12, _BLACKWELL_RINGS),
        Device("l40s-48g", 44.0, *_L40S, 0.864e12, _PCIE_RINGS),
        # One core packs K and V for its kernels and adds up their gradients: 6 to 8 us were
        # measured for a token of 256 channels, at this rate 7.
        Device("cpu", 8.0, 30e9, 15e9, 5e-4, {2: 2e9}, 2e9, 1e-4, 1, memory_bytes_per_second=1e9),
    )
}


# GPUs of the catalogue, by the least memory and compute capability that they have.
_GPUS = (
    ("b200-180g", 100 * GIB, 10),
    ("h200-141g", 100 * GIB, 0),
    ("h100-80g", 0, 9),
    ("a100-80g", 50 * GIB, 0),
    ("a100-40g", 0, 0),
)


def gpu_name(memory_bytes: int, capability: int) -> str:
    """Return the catalogue's name of a GPU.

    Args:
        memory_bytes: All of its memory.
        capability: The major number of its compute capability.
    """
    return next(
        name for name, least, major in _GPUS if memory_bytes > least and capability >= major
    )


_RUN = re.compile(r"([^*]+?)(?:\*([1-9][0-9]{0,5}))?")
_LIST = "expected names or files with their numbers of ranks, as in h100-80g*4,a100-80g*4"


def device_runs(text: str) -> tuple[tuple[str, int], ...]:
    """(name or file, ranks) of every part of ``h100-80g*4,a100-80g*4``; a part without a number is
    one rank."""
    runs = []
    for part in text.split(","):
        match = _RUN.fullmatch(part)
        if match is None:
            raise ValueError(f"device {text!r}: {part!r} is no device with a number; {_LIST}")
        runs.append((match[1], int(match[2] or 1)))
    return tuple(runs)


def differ_by_rank(text: str) -> bool:
    """Whether ``text`` says the device of every rank, not one for all."""
    return "," in text or "*" in text


def devices_of(text: str, ranks: int) -> tuple[Device, ...]:
    """The device of every rank of one replica's pipeline: all that called ``text``, or by runs, as
    :func:`device_runs` reads them, which add up to ``ranks``."""
    if not differ_by_rank(text):
        return (device(text),) * ranks
    runs = device_runs(text)
    if (named := sum(count for _, count in runs)) != ranks:
        raise ValueError(
            f"device {text!r}: of {named} ranks, and the pipeline has {ranks}; {_LIST}"
        )
    return tuple(each for name, count in runs for each in (device(name),) * count)


def device_budgets(flag: str, gib: Sequence[float], rank_of: Sequence[int]) -> tuple[float, ...]:
    """Return the memory budget of every pipeline rank's device, in bytes.

    Args:
        flag: The name of the flag that gave ``gib``, for the error message.
        gib: One number for all ranks, or one for every pipeline rank. One for every stage is
            accepted where ranks have several stages, if it is the same for all stages of a rank.
        rank_of: The pipeline rank of every stage.

    Raises:
        ValueError: Another number of budgets, or two for one rank.
    """
    ranks = 1 + max(rank_of)
    budgets = tuple(gib) * ranks if len(gib) == 1 else tuple(gib)
    if ranks < len(rank_of) == len(budgets):
        by_rank = dict(zip(rank_of, budgets, strict=True))
        if all(by_rank[rank] == each for rank, each in zip(rank_of, budgets, strict=True)):
            budgets = tuple(by_rank[rank] for rank in range(ranks))
    if len(budgets) != ranks:
        raise ValueError(
            f"{flag}: {len(gib)} numbers for {ranks} pipeline ranks; expected one, or one for each "
            "of them"
        )
    return tuple(each * GIB for each in budgets)


def device(name: str) -> Device:
    """The device called ``name``, or the one that the JSON file at ``name`` describes."""
    return pick("device", name, DEVICES, Device)
