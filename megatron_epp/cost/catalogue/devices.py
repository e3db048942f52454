"""Devices and the links between them."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_epp.cost.catalogue.named import pick
from megatron_epp.flag_fields import did_you_mean
from megatron_epp.ir import Kind
from megatron_epp.ir.errors import quoted, require_name

# Host time of I and of W, relative to the host time of B: an assumption.
HOST_INPUT, HOST_WEIGHT = 0.8, 0.45
GIB = 2**30
MOST_DEVICES = 1_000_000
# Shared by --epp-memory-budget-gib of training and --memory-budget-gib of the other commands.
BUDGET_HELP = (
    "Memory budget of a device in GiB: one number, or one for each pipeline rank. On a GPU it "
    "includes the model states; on a CPU it covers only what chunks hold between forward and "
    "backward."
)

# Smallest and largest value of each number, far beyond any machine; times then stay finite.
_RATE = (1.0, 1e24)
_LIMITS: Mapping[str, tuple[float, float]] = {
    "budget_gib": (1e-3, 1e6),
    "linear_flops": _RATE,
    "attention_flops": _RATE,
    "launch_seconds": (0.0, 1e3),
    "link_bytes_per_second": _RATE,
    "link_latency_seconds": (0.0, 1e3),
    "node_devices": (1, MOST_DEVICES),
    "host_devices": (0, MOST_DEVICES),
    "host_bytes_per_second": (0.0, 1e24),
    "memory_bytes_per_second": (0.0, 1e24),
    "memory_efficiency": (0.0, 1.0),
    "tail_seconds": (0.0, 1e3),
    "host_forward_seconds": (0.0, 1e3),
    "host_backward_seconds": (0.0, 1e3),
    "peak_flops": (0.0, 1e24),
}


def require_number(
    name: str, value: Any, least: float, most: float, *, integer: bool = False
) -> float:
    """Return ``value`` as a float; ValueError if it is no number, or outside least to most."""
    kinds = int if integer else int | float
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
        raise ValueError(f"{name} {quoted(value)}: expected a {'whole ' * integer}number")
    if not least <= value <= most:
        limits = "a number above 0" if value <= 0 < least else f"from {least:g} to {most:g}"
        raise ValueError(f"{name} {quoted(value)}: expected {limits}")
    return float(value)


def _by_size(name: str, table: Any, limits: tuple[float, float] = _RATE) -> dict[int, float]:
    """Return ``table`` (rates or seconds by group size) with integers instead of texts as keys."""
    if not isinstance(table, Mapping):
        raise ValueError(f"{name}: expected a number by group size")
    rates = {}
    for size, rate in table.items():
        where = f"{name} of a group of {quoted(size)}"
        devices = int(size) if str(size).isdecimal() else 0
        if not 2 <= devices <= MOST_DEVICES:
            raise ValueError(f"{where}: expected a size from 2 to {MOST_DEVICES}")
        rates[devices] = require_number(where, rate, *limits)
    return rates


@dataclass(frozen=True, slots=True)
class Device:
    """Rates of a device that an analytic profile uses.

    Attributes:
        name: name on the command line.
        budget_gib: memory for training in GiB: the device's memory except a margin for the CUDA
            context and fragmentation.
        linear_flops: achieved flops per second of matrix products (not the data sheet's).
        attention_flops: achieved flops per second of attention kernels.
        launch_seconds: seconds per layer and chunk in forward; backward takes twice as long.
        group_bytes_per_second: all-to-all rate of one device by group size. Groups of up to
            ``node_devices`` devices are in one node. If memory_efficiency is set, rates are those
            of the wire, for bytes that leave a device; otherwise they include memory copies.
        link_bytes_per_second: rate of a node's network link, in one direction.
        link_latency_seconds: latency of one message between stages.
        node_devices: number of devices of a node, which share its link.
        host_devices: number of devices of a host, if a node (an NVLink domain) consists of several
            hosts; 0: a node is one host.
        host_bytes_per_second: rate between one device and host memory in one direction, while the
            other direction is busy, too; 0: none or unknown.
        memory_bytes_per_second: rate of the device's memory; 0: unknown, so that reading K and V
            takes no time.
        tensor_bytes_per_second: rate of gathers and scatters inside a node by group size, as
            nccl-tests counts bus bandwidth; empty: the rate of an all-to-all.
        gather_latency_seconds: latency of one gather or scatter, by group size.
        memory_efficiency: fraction of the memory rate that element-wise kernels and weight reads
            achieve; 0: linear_flops include their time.
        tail_seconds: seconds per dense layer and chunk in which a forward's kernels start and end,
            with idle multiprocessors; backward takes half as long; 0: other rates include them.
        host_forward_seconds: host time to issue a layer's forward, a lower bound of its time; 0:
            unknown.
        host_backward_seconds: host time to issue a layer's backward.
        peak_flops: data-sheet flops per second in bf16 without sparsity, the divisor of MFU; 0:
            unknown.

    Raises:
        ValueError: the name is invalid, a number is out of bounds, or there is no group rate.
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
    tail_seconds: float = 0.0
    host_forward_seconds: float = 0.0
    host_backward_seconds: float = 0.0
    peak_flops: float = 0.0
    host_devices: int = 0

    def __post_init__(self):
        require_name("device name", self.name)
        for name in ("group_bytes_per_second", "tensor_bytes_per_second"):
            object.__setattr__(self, name, _by_size(name, getattr(self, name)))
        latency = _by_size("gather_latency_seconds", self.gather_latency_seconds, (0.0, 1e3))
        object.__setattr__(self, "gather_latency_seconds", latency)
        if not self.group_bytes_per_second:
            raise ValueError("group_bytes_per_second: expected a rate for one size at least")
        for name, limits in _LIMITS.items():
            require_number(name, getattr(self, name), *limits, integer=name.endswith("_devices"))

    @property
    def host_seconds(self) -> dict[Kind, float]:
        """Seconds that the host takes to issue the ops of one layer, by kind."""
        if not self.host_forward_seconds:
            return {}
        return host_seconds_of(self.host_forward_seconds, self.host_backward_seconds)

    def devices_of_a_host(self, node_devices: int) -> int:
        """Return the devices of a host in nodes of ``node_devices`` devices."""
        return min(self.host_devices or node_devices, node_devices)

    @property
    def budget_bytes(self) -> float:
        """Memory for training in bytes."""
        return self.budget_gib * GIB


def host_seconds_of(forward: float, backward: float) -> dict[Kind, float]:
    """Return the host's seconds to issue each op of a layer, given those of F and B."""
    halves = {Kind.INPUT: HOST_INPUT * backward, Kind.WEIGHT: HOST_WEIGHT * backward}
    return {Kind.FORWARD: forward, Kind.BACKWARD: backward, **halves}


# Bytes per second by group size that FlexSP published for A100 nodes with two InfiniBand cards.
_A100_GROUPS = {2: 119.5e9, 4: 104.1e9, 8: 96.5e9, 16: 10.33e9, 32: 5.94e9, 64: 4.87e9}
# Fitted rates of the wires inside a node. Hopper: rate that an exchange of an MoE layer reaches on
# NVLink of 450 GB/s (`megatron-moe-layer` of the public measurements). H800: on 200 GB/s
# (`pai-h800`). Blackwell: on 900 GB/s (`simumax-b200`). Across nodes a device has its fraction of
# the node's link.
_HOPPER_WIRE, _H800_WIRE, _BLACKWELL_WIRE = {2: 430e9}, {2: 120e9}, {2: 520e9}
# Gathers and scatters inside a node. The bus bandwidth of nccl-tests on eight A100 is about 200
# GB/s (NVIDIA/nccl-tests issue 149). On eight H100 it is 360 GB/s after a latency that grows with
# the group (`nccl-all-gather-*` and `nccl-reduce-scatter-*` of the public measurements). Other
# devices are scaled by their NVLink rate.
_A100_RINGS, _HOPPER_RINGS, _H800_RINGS = {2: 200e9}, {2: 360e9}, {2: 160e9}
_BLACKWELL_RINGS, _PCIE_RINGS = {2: 560e9}, {2: 20e9}
_LATENCY = {2: 27e-6, 4: 33e-6, 8: 45e-6}
# PCIe 4 and 5 with 16 lanes reach about 25 and 50 GB/s. Lower rates are assumed, because all
# devices of a node share the host's memory.
_PCIE_4, _PCIE_5 = 20e9, 40e9

# Budgets: 74 GiB of 80 for A800-80GB; the others have the same fraction.
# Rates of the A100: implied by FlexSP's constants (212 and 179 Tflops of 312), including all other
# work of a layer.
# Rates of Hopper and B200: fitted to public measurements that are not held out
# (scripts/bench/results/public-measurements.md). Products are fitted to `own-h100-layer`,
# `megatron-moe-layer` and `simumax-b200`, attention to `trl-long` and `simumax-b200`.
# Rates of other devices: scaled by their data sheets. H800 is an H100 with 400 GB/s NVLink; H20 has
# 148 Tflops; GB200 has 2,450 Tflops and NVLink across racks (64 of 72 devices are counted). L40S
# has 362 Tflops and PCIe 4 only. One core of a server reaches about 30 Gflops in float32.
# Memory rates are those of the data sheets. With these rates, reading K and V explains
# FlashAttention-3's published times (tests/cost/test_published_attention.py).
# Nothing is fitted to SimuMax's microbenchmarks of a B200 (configs/system/b200_bf16_ceperm.json).
# They reach 1,098 Tflops in products, 606 GB/s in gathers and 537 GB/s in an all-to-all.
_A100 = (212e12, 179e12, 1e-4, _A100_GROUPS, 50e9, 1e-5, 8, _PCIE_4)
_HOPPER = (760e12, 530e12, 1e-4, _HOPPER_WIRE, 400e9, 1e-5, 8, _PCIE_5)
_H800 = (760e12, 530e12, 1e-4, _H800_WIRE, 400e9, 1e-5, 8, _PCIE_5)
_H20 = (114e12, 79e12, 1e-4, _HOPPER_WIRE, 400e9, 1e-5, 8, _PCIE_5)
_B200 = (1000e12, 880e12, 1e-4, _BLACKWELL_WIRE, 400e9, 1e-5, 8, _PCIE_5)
_GB200 = (1090e12, 960e12, 1e-4, _BLACKWELL_WIRE, 3200e9, 1e-5, 64, 200e9)
_L40S = (217e12, 181e12, 1e-4, {2: 20e9}, 200e9, 1e-5, 8, _PCIE_4)
# Host time of a layer, measured on the host of an H100 with few tokens (`own-h100-layer`). It does
# not depend on the GPU.
_HOST: dict[str, Any] = {"host_forward_seconds": 2.1e-3, "host_backward_seconds": 1.65e-3}
# Kernels that start and end: what forwards of 4096 and 8192 tokens and backwards of 1024 and 2048
# take beyond the other rates (`own-h100-layer`, rows that are not held out: 0.2 and 0.1 ms). With
# the unfused layers of Seq1F1B on A100 it is 0.9 and 0.3 to 0.6 ms (`seq1f1b`).
_TAIL: dict[str, Any] = {**_HOST, "tail_seconds": 2e-4}
_FAST: dict[str, Any] = {**_TAIL, "gather_latency_seconds": _LATENCY, "memory_efficiency": 0.8}
# Kernels that only move bytes reach half the data sheet's rate on Blackwell: fitted to the rows of
# `simumax-b200`, dense and MoE, that are not held out. With 0.8, their MoE steps are 11% too fast.
# Blackwell's other rates were fitted together with the tails of kernels.
_BLACKWELL = _FAST | {"memory_efficiency": 0.5, "tail_seconds": 0.0}
_TRAY = _BLACKWELL | {"host_devices": 4}
DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device("a100-40g", 37.0, *_A100, 1.555e12, _A100_RINGS, peak_flops=312e12, **_TAIL),
        Device("a100-80g", 74.0, *_A100, 2.039e12, _A100_RINGS, peak_flops=312e12, **_TAIL),
        Device("h100-80g", 74.0, *_HOPPER, 3.35e12, _HOPPER_RINGS, peak_flops=989e12, **_FAST),
        Device("h200-141g", 130.0, *_HOPPER, 4.8e12, _HOPPER_RINGS, peak_flops=989e12, **_FAST),
        Device("h800-80g", 74.0, *_H800, 3.35e12, _H800_RINGS, peak_flops=989e12, **_FAST),
        Device("h20-96g", 89.0, *_H20, 4.0e12, _HOPPER_RINGS, peak_flops=148e12, **_FAST),
        Device(
            "b200-180g", 166.0, *_B200, 8e12, _BLACKWELL_RINGS, peak_flops=2250e12, **_BLACKWELL
        ),
        Device("gb200-186g", 172.0, *_GB200, 8e12, _BLACKWELL_RINGS, peak_flops=2450e12, **_TRAY),
        Device("l40s-48g", 44.0, *_L40S, 0.864e12, _PCIE_RINGS, peak_flops=362e12, **_FAST),
        # One core packs K and V for its kernels and accumulates their gradients. For a token of 256
        # channels this took 6 to 8 us; at this rate it is 7 us.
        Device("cpu", 8.0, 30e9, 15e9, 5e-4, {2: 2e9}, 2e9, 1e-4, 1, memory_bytes_per_second=1e9),
    )
}

BLACKWELL = ("b200-180g", "gb200-186g")

# GPUs of the catalogue, with lower bounds of their memory and compute capability.
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
        memory_bytes: total memory in bytes.
        capability: major number of the GPU's compute capability.
    """
    return next(
        name for name, least, major in _GPUS if memory_bytes > least and capability >= major
    )


def device_like(text: str, memory_bytes: float = math.inf) -> Device | None:
    """Return the device called ``text``, or a device whose chip ``text`` names; else None.

    ``NVIDIA H100 80GB HBM3``, as torch calls this GPU, gives ``h100-80g``. If several devices have
    the chip, the device with the largest budget up to ``memory_bytes`` is returned.
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


# Smallest valid file.
_EXAMPLE = (
    '{"name": "mine", "budget_gib": 74, "linear_flops": 760e12, "attention_flops": 530e12, '
    '"launch_seconds": 1e-4, "group_bytes_per_second": {"2": 430e9}, "link_bytes_per_second": '
    '400e9, "link_latency_seconds": 1e-5}'
)


def device_budgets(flag: str, gib: Sequence[float], rank_of: Sequence[int]) -> tuple[float, ...]:
    """Return the memory budget of every pipeline rank's device, in bytes.

    Args:
        flag: name of the flag that gave ``gib``, for the error message.
        gib: one number for all ranks, or one for every pipeline rank. If ranks have several stages,
            one number for every stage is accepted too; stages of one rank need equal numbers.
        rank_of: pipeline rank of every stage.

    Raises:
        ValueError: the number of budgets is wrong, or stages of one rank have different budgets.
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
    """Return the device called ``name``, or the device that the JSON file at ``name`` describes.

    Raises:
        ValueError: the device is unknown, or the file is invalid.
    """
    if re.search("[*,]", name) and not name.endswith(".json"):
        raise ValueError(
            f"device {quoted(name)}: several devices are no longer accepted; expected one for all "
            "pipeline ranks, the slowest (training measures ranks that are slower than others)"
        )
    if name not in DEVICES and not name.endswith(".json") and "/" not in name:
        near = did_you_mean(name, DEVICES, most=3, cutoff=0.4)
        known = f"{near} Known:" if near else "Known:"
        raise ValueError(
            f"unknown device {quoted(name)}; {known} {', '.join(DEVICES)}; or a JSON file "
            f"{_EXAMPLE}"
        )
    return pick("device", name, DEVICES, Device)
