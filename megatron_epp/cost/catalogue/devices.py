"""Devices, and the links between them."""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_epp.cost.catalogue.named import pick
from megatron_epp.ir import Kind
from megatron_epp.ir.errors import quoted, require_name

# Host time of the halves of a backward over that of the whole: an assumption.
HOST_INPUT, HOST_WEIGHT = 0.8, 0.45
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
    "memory_efficiency": (0.0, 1.0),
    "host_forward_seconds": (0.0, 1e3),
    "host_backward_seconds": (0.0, 1e3),
    "peak_flops": (0.0, 1e24),
}


def _number(name: str, value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} {quoted(value)}: expected a number")
    if not least <= value <= most:
        limits = "a number above 0" if value <= 0 < least else f"from {least:g} to {most:g}"
        raise ValueError(f"{name} {quoted(value)}: expected {limits}")
    return float(value)


def _by_size(name: str, table: Any, limits: tuple[float, float] = _RATE) -> dict[int, float]:
    """Rates, or seconds, by group size; JSON has its sizes as texts."""
    if not isinstance(table, Mapping):
        raise ValueError(f"{name}: expected a number by group size")
    rates = {}
    for size, rate in table.items():
        where = f"{name} of a group of {quoted(size)}"
        devices = int(size) if str(size).isdecimal() else 0
        if not 2 <= devices <= MOST_DEVICES:
            raise ValueError(f"{where}: expected a size from 2 to {MOST_DEVICES}")
        rates[devices] = _number(where, rate, *limits)
    return rates


@dataclass(frozen=True, slots=True)
class Device:
    """A device, as far as an analytic profile takes something from it.

    budget_gib              what training may use: memory less a margin for context and fragments
    linear_flops            reached by matrix products, flops per second (not the data sheet's)
    attention_flops         reached by attention's kernels
    launch_seconds          per layer and chunk, forward; backward twice that
    group_bytes_per_second  all-to-all bandwidth of one device inside a group, by group size: the
                            first ``node_devices`` share a node. With a memory_efficiency the
                            wire's, of what leaves a device; else of all bytes, copies included
    link_bytes_per_second   between neighbouring stages, one direction, per node
    node_devices            devices of a node, which share its link
    link_latency_seconds    of one message
    host_bytes_per_second   between one device and its host's memory, one direction while the
                            other one is busy too; 0: none, or not known
    memory_bytes_per_second its own memory's; 0: not known, so that reading K and V costs nothing
    tensor_bytes_per_second of gathers and scatters inside a node, by group size, as nccl-tests
                            counts bus bandwidth; none: as all-to-all
    gather_latency_seconds  of one gather or scatter besides, by group size
    memory_efficiency       share of the memory's rate that element-wise kernels reach, and reads
                            of weights; 0: what these take is contained in linear_flops
    host_forward_seconds    that the host takes to issue a layer's forward: no op is faster
    host_backward_seconds   its backward
    peak_flops              the data sheet's in bf16 without sparsity, which MFU divides by; 0: none
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
    gather_latency_seconds: Mapping[int, float] = field(default_factory=dict)
    memory_efficiency: float = 0.0
    host_forward_seconds: float = 0.0
    host_backward_seconds: float = 0.0
    peak_flops: float = 0.0

    def __post_init__(self):
        require_name("device name", self.name)
        for name in ("group_bytes_per_second", "tensor_bytes_per_second"):
            object.__setattr__(self, name, _by_size(name, getattr(self, name)))
        latency = _by_size("gather_latency_seconds", self.gather_latency_seconds, (0.0, 1e3))
        object.__setattr__(self, "gather_latency_seconds", latency)
        if not self.group_bytes_per_second:
            raise ValueError("group_bytes_per_second: expected a rate for one size at least")
        for name, limits in _LIMITS.items():
            _number(name, getattr(self, name), *limits)
        if not isinstance(self.node_devices, int) or isinstance(self.node_devices, bool):
            raise ValueError(f"node_devices {quoted(self.node_devices)}: expected a whole number")

    @property
    def host_seconds(self) -> dict[Kind, float]:
        """Return the seconds that the host takes to issue the ops of one layer."""
        if not self.host_forward_seconds:
            return {}
        return host_seconds_of(self.host_forward_seconds, self.host_backward_seconds)

    @property
    def budget_bytes(self) -> float:
        return self.budget_gib * GIB


def host_seconds_of(forward: float, backward: float) -> dict[Kind, float]:
    """Seconds that the host takes to issue each op of a layer, by those of F and B."""
    halves = {Kind.INPUT: HOST_INPUT * backward, Kind.WEIGHT: HOST_WEIGHT * backward}
    return {Kind.FORWARD: forward, Kind.BACKWARD: backward, **halves}


# Bytes per second by group size, published by FlexSP for A100 nodes with two InfiniBand cards.
_A100_GROUPS = {2: 119.5e9, 4: 104.1e9, 8: 96.5e9, 16: 10.33e9, 32: 5.94e9, 64: 4.87e9}
# Wires inside a node, fitted: of Hopper's NVLink of 450 GB/s what layers of experts leave for an
# exchange (`megatron-moe-layer` of the public measurements), of H800's 200 `pai-h800`, of
# Blackwell's 900 `simumax-b200`. Over nodes a device has its part of the node's link.
_HOPPER_WIRE, _H800_WIRE, _BLACKWELL_WIRE = {2: 430e9}, {2: 120e9}, {2: 520e9}
# Gathers and scatters inside a node: nccl-tests' bus bandwidth on eight A100 is about 200 (NVIDIA/
# nccl-tests issue 149). On eight H100 360 after a latency that grows with the group, as
# `nccl-all-gather-*` and `nccl-reduce-scatter-*` of the public measurements have it; others in the
# ratio of their NVLink.
_A100_RINGS, _HOPPER_RINGS, _H800_RINGS = {2: 200e9}, {2: 360e9}, {2: 160e9}
_BLACKWELL_RINGS, _PCIE_RINGS = {2: 560e9}, {2: 20e9}
_LATENCY = {2: 27e-6, 4: 33e-6, 8: 45e-6}
# PCIe 4 and 5 with 16 lanes reach about 25 and 50 GB/s; less is taken, since a host's memory serves
# all devices of a node. An assumption: 20 is our study's, which says what 10 and 5 would change.
_PCIE_4, _PCIE_5 = 20e9, 40e9

# Budgets: 74 GiB of 80 is the study's (planning on A800-80GB); the others in the same share.
# Rates: A100's are what FlexSP's constants imply (212 and 179 Tflops of 312), with all that a
# layer does besides; Hopper's and B200's are fitted to public measurements that are not held out,
# as docs/results/public_measurements.md has them: products to `own-h100-layer`,
# `megatron-moe-layer` and `simumax-b200`, attention to `trl-long` and `simumax-b200`. Others
# follow in the shares of their data sheets: H800 is an H100 with 400 GB/s of NVLink, H20 has 148
# Tflops, GB200 2,450 and NVLink over racks (64 of 72 devices counted), L40S 362 and PCIe 4 alone.
# One core of a server reaches about 30 Gflops in float32. Memory's rates are the data sheets':
# read at that rate, K and V explain FlashAttention-3's published times
# (tests/cost/test_published_attention.py). SimuMax's own microbenchmarks of a B200
# (configs/system/b200_bf16_ceperm.json), to which nothing is fitted, have products at 1,098
# Tflops, gathers at 606 GB/s and an all-to-all at 537.
_A100 = (212e12, 179e12, 1e-4, _A100_GROUPS, 50e9, 1e-5, 8, _PCIE_4)
_HOPPER = (760e12, 530e12, 1e-4, _HOPPER_WIRE, 400e9, 1e-5, 8, _PCIE_5)
_H800 = (760e12, 530e12, 1e-4, _H800_WIRE, 400e9, 1e-5, 8, _PCIE_5)
_H20 = (114e12, 79e12, 1e-4, _HOPPER_WIRE, 400e9, 1e-5, 8, _PCIE_5)
_B200 = (1000e12, 880e12, 1e-4, _BLACKWELL_WIRE, 400e9, 1e-5, 8, _PCIE_5)
_GB200 = (1090e12, 960e12, 1e-4, _BLACKWELL_WIRE, 3200e9, 1e-5, 64, 200e9)
_L40S = (217e12, 181e12, 1e-4, {2: 20e9}, 200e9, 1e-5, 8, _PCIE_4)
# Host time of a layer, measured on the host of an H100: `own-h100-layer`, few tokens. A host issues
# the same to any GPU.
_HOST: dict[str, Any] = {"host_forward_seconds": 2.1e-3, "host_backward_seconds": 1.65e-3}
_FAST: dict[str, Any] = {**_HOST, "gather_latency_seconds": _LATENCY, "memory_efficiency": 0.8}
DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device("a100-40g", 37.0, *_A100, 1.555e12, _A100_RINGS, peak_flops=312e12, **_HOST),
        Device("a100-80g", 74.0, *_A100, 2.039e12, _A100_RINGS, peak_flops=312e12, **_HOST),
        Device("h100-80g", 74.0, *_HOPPER, 3.35e12, _HOPPER_RINGS, peak_flops=989e12, **_FAST),
        Device("h200-141g", 130.0, *_HOPPER, 4.8e12, _HOPPER_RINGS, peak_flops=989e12, **_FAST),
        Device("h800-80g", 74.0, *_H800, 3.35e12, _H800_RINGS, peak_flops=989e12, **_FAST),
        Device("h20-96g", 89.0, *_H20, 4.0e12, _HOPPER_RINGS, peak_flops=148e12, **_FAST),
        Device("b200-180g", 166.0, *_B200, 8e12, _BLACKWELL_RINGS, peak_flops=2250e12, **_FAST),
        Device("gb200-186g", 172.0, *_GB200, 8e12, _BLACKWELL_RINGS, peak_flops=2450e12, **_FAST),
        Device("l40s-48g", 44.0, *_L40S, 0.864e12, _PCIE_RINGS, peak_flops=362e12, **_FAST),
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


def device_like(text: str, memory_bytes: float = math.inf) -> Device | None:
    """Return the device of the catalogue of that name, or of that chip.

    ``NVIDIA H100 80GB HBM3``, as torch has it, is an ``h100-80g``. Of several with the chip it is
    the one with most memory, but with no more than ``memory_bytes`` for a job; None where the
    catalogue has none.
    """
    words = set(re.split(r"[^a-z0-9]+", text.lower()))
    chips = [
        each
        for name, each in DEVICES.items()
        if name.partition("-")[0] in words
        and "cpu" not in words
        and each.budget_bytes <= memory_bytes
    ]
    most = max(chips, key=lambda each: each.budget_bytes, default=None)
    return DEVICES.get(text) or most


_RUN = re.compile(r"([^*]+?)(?:\*([1-9][0-9]{0,5}))?")
# What a file needs at least.
_EXAMPLE = (
    '{"name": "mine", "budget_gib": 74, "linear_flops": 760e12, "attention_flops": 530e12, '
    '"launch_seconds": 1e-4, "group_bytes_per_second": {"2": 430e9}, "link_bytes_per_second": '
    '400e9, "link_latency_seconds": 1e-5}'
)
_LIST = "expected names or files with their numbers of ranks, as in h100-80g*4,a100-80g*4"


def device_runs(text: str) -> tuple[tuple[str, int], ...]:
    """(name or file, ranks) of every part of ``h100-80g*4,a100-80g*4``; a part without a number is
    one rank."""
    runs = []
    for part in text.split(","):
        match = _RUN.fullmatch(part)
        if match is None:
            raise ValueError(
                f"device {quoted(text)}: {quoted(part)} is no device with a number; {_LIST}"
            )
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
            f"device {quoted(text)}: of {named} ranks, and the pipeline has {ranks}; {_LIST}"
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
    if name not in DEVICES and not name.endswith(".json") and "/" not in name:
        near = difflib.get_close_matches(name, DEVICES, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(
            f"unknown device {quoted(name)}; {hint}Known: {', '.join(DEVICES)}; or a JSON file "
            f"{_EXAMPLE}"
        )
    return pick("device", name, DEVICES, Device)
