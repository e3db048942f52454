#!/usr/bin/env python3
"""The kernels of layers with a state as GPUs run them, on this host's CPU, in Triton's interpreter.

    scripts/upstream/state_kernels.py --packages FOLDER [mamba] [delta]

What hosts without a GPU compute instead (layers/states/scans.py) cannot tell whether a kernel does
with a state, with rows in front of a border and with sequences behind each other what this package
hands it for. So mamba_ssm's and flash-linear-attention's own Triton kernels are interpreted, in
float32, called as training calls them: documents cut into slices, with whole ones behind the last
slice in the same call, against whole documents, outputs and every gradient. Mamba's convolution is
CUDA's and stays torch's here. Minutes of one core.

The packages need not be built, and Triton 3.6's interpreter wants a numpy before 2.3:

    pip download --no-deps --no-binary :all: mamba-ssm fla-core     unpack both into FOLDER
    pip install --no-deps --target FOLDER numpy==2.2.6
"""

import argparse
import importlib
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BOUND = 2e-5  # of a float32 sum over some hundred rows, relative to the largest
HEADS, GROUPS, VALUES, KEYS, TAPS = 2, 1, 16, 16, 4


@dataclass(frozen=True, slots=True)
class Case:
    """Documents; the first is cut at ``borders``, the others lie whole behind its last slice."""

    lengths: tuple[int, ...]
    borders: tuple[int, ...]

    def __str__(self) -> str:
        first, *others = self.lengths
        behind = f", {' and '.join(map(str, others))} behind" if others else ""
        return f"{first} rows cut at {', '.join(map(str, self.borders))}{behind}"

    @property
    def cut(self) -> str:
        """A plan of one stage."""
        points = (0, *self.borders, self.lengths[0])
        chunks = [f"0[{a}:{b}]" for a, b in pairwise(points)]
        chunks[-1] += "".join(f" {n + 1}[0:{rows}]" for n, rows in enumerate(self.lengths[1:]))
        return self._plan(chunks)

    @property
    def whole(self) -> str:
        return self._plan([f"{n}[0:{rows}]" for n, rows in enumerate(self.lengths)])

    def _plan(self, chunks: list[str]) -> str:
        lines = [f"chunk {n}: {spans}" for n, spans in enumerate(chunks)]
        forwards = [f"F{n}" for n in range(len(chunks))]
        backwards = [f"B{n}" for n in reversed(range(len(chunks)))]
        return "\n".join(
            [
                "plan v1",
                "replica 0 of 1",
                f"documents {' '.join(map(str, self.lengths))}",
                "layers 1",
                *lines,
                f"recompute 0: {' '.join(['1k'] * len(chunks))}",
                f"stage 0: {' '.join(forwards + backwards)}",
                "",
            ]
        )


CASES = {
    "mamba": (Case((64,), (32,)), Case((150, 40, 5), (64, 128)), Case((100, 33), (2, 50))),
    "delta": (Case((100,), (37,)), Case((150, 20), (64, 100))),
}


# ------------------------------------------------------------------ Triton without a GPU


def load_kernels(packages: Path, wanted: list[str]) -> dict[str, Any]:
    """The kernels' functions, by name. ImportError: a package is not there."""
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path[:0] = [str(packages)]
    importlib.import_module("numpy")
    import torch
    import triton

    plain = triton.autotune
    triton.autotune = lambda configs, key, **others: plain(configs[:1], key)
    torch.cuda.device = lambda index: nullcontext()
    torch.cuda.get_device_properties = lambda index=0: SimpleNamespace(
        multi_processor_count=1, shared_memory_per_block_optin=1 << 18, major=9, minor=0
    )
    found = {}
    if "mamba" in wanted:
        _put_convolution()
        for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
            package = ModuleType(name)  # without what it imports, which is compiled
            package.__path__ = [str(packages / name.replace(".", "/"))]
            sys.modules[name] = package
        module = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
        found["mamba"] = module.mamba_split_conv1d_scan_combined
    if "delta" in wanted:
        module = importlib.import_module("fla.ops.gated_delta_rule.chunk")
        found["delta"] = module.chunk_gated_delta_rule
    return found


def _put_convolution() -> None:
    """causal_conv1d's functions by torch, with sequences that lie one behind the other."""
    import torch
    import torch.nn.functional as F

    def convolved(x_BCL: Any, weight: Any, bias: Any, numbers: Any) -> Any:
        taps, rows = weight.shape[1], x_BCL.shape[2]
        made = bias[None, :, None].expand_as(x_BCL)
        for back in range(taps):
            moved = F.pad(x_BCL, (back, 0))[..., :rows]
            if numbers is not None:
                moved = moved * (F.pad(numbers, (back, 0), value=-1)[:, :rows] == numbers)[:, None]
            made = made + moved * weight[None, :, taps - 1 - back, None]
        return F.silu(made)

    def forward(x: Any, weight: Any, bias: Any, numbers: Any, *others: Any) -> Any:
        return convolved(x, weight, bias, numbers)

    def backward(x, weight, bias, gradient, numbers, initial, final, into, *others) -> Any:
        inputs = [one.detach().requires_grad_() for one in (x, weight, bias)]
        with torch.enable_grad():
            made = convolved(*inputs, numbers)
        return (*torch.autograd.grad(made, inputs, gradient), None)

    functions = {
        "causal_conv1d_fwd_function": forward,
        "causal_conv1d_bwd_function": backward,
        "causal_conv1d_update_function": None,
    }
    package, module = ModuleType("causal_conv1d"), ModuleType("causal_conv1d.cpp_functions")
    package.causal_conv1d_fn = None
    vars(module).update(functions)
    sys.modules |= {"causal_conv1d": package, "causal_conv1d.cpp_functions": module}


# ------------------------------------------------------------------ layers as training has them


class MambaLayer:
    """What lies between the projections of a Mamba mixer, by the kernel ``scan``."""

    CHANNELS = 2 * HEADS * VALUES + 2 * GROUPS * KEYS + HEADS

    def __init__(self, kernel: Any):
        import torch
        from megatron.core.ssm import mamba_mixer

        from megatron_epp.mcore.model.states import mamba

        mamba_mixer.mamba_split_conv1d_scan_combined = kernel
        convolved = HEADS * VALUES + 2 * GROUPS * KEYS
        self.weights = [
            0.5 * torch.randn(convolved, TAPS),
            torch.randn(convolved),
            torch.randn(HEADS) - 2,
            torch.rand(HEADS).log(),
            torch.randn(HEADS),
        ]
        weight, bias, dt_bias, A_log, D = self.weights
        cp = SimpleNamespace(
            get_conv1d_weight=lambda: weight[:, None],
            get_conv1d_bias=lambda: bias,
            get_dt_bias=lambda: dt_bias,
            get_A_log=lambda: A_log,
            get_D=lambda: D,
            d_inner_local_tpcp=HEADS * VALUES,
            ngroups_local_tpcp=GROUPS,
        )
        scan = object.__new__(mamba.MambaScan)
        scan.layer, scan.mine, scan.whole, scan.ulysses = 0, cp, cp, None
        scan.mixer = SimpleNamespace(
            headdim=VALUES,
            D_has_hdim=False,
            chunk_size=32,
            activation="silu",
            norm_before_gate=False,
            mamba_training_ssm_states_dtype=torch.float32,
        )
        self.run = lambda rows, state: scan.scan(rows, state, False)

    def inputs(self, rows: int) -> Any:
        import torch

        return torch.randn(rows, self.CHANNELS)


class DeltaLayer:
    """The rule of a gated delta net, by the kernel ``rule``."""

    def __init__(self, kernel: Any):
        from megatron_epp.layers.states.carried import CarriedStates
        from megatron_epp.mcore.model.states import delta

        self.weights: list[Any] = []
        scan = object.__new__(delta.DeltaScan)
        scan.net = SimpleNamespace(gated_delta_rule=kernel)

        def run(rows: Any, state: Any) -> Any:
            sizes = (HEADS * KEYS, HEADS * KEYS, HEADS * VALUES, HEADS, HEADS)
            q, k, v, g, beta = rows[None].split(sizes, -1)
            q, k, v = (x.unflatten(-1, (HEADS, -1)) for x in (q, k, v))
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            states = CarriedStates(state, 0, TAPS, rows.shape[1])
            for number, call in enumerate(states.calls):
                mine = rows[call.start : call.stop]
                front = states.front(number, mine)
                states.behind(number, mine if front is None else _behind(front, mine))
            return scan.apply_rule((q, k, v, -g.exp(), beta.sigmoid()), states)[0]

        self.run = run

    def inputs(self, rows: int) -> Any:
        import torch

        return torch.randn(rows, 2 * HEADS * KEYS + HEADS * VALUES + 2 * HEADS)


def _behind(front: Any, rows: Any) -> Any:
    import torch

    return torch.cat((front, rows))


def computed(layer: Any, text: str, inputs: list[Any], factors: list[Any]) -> list[Any]:
    """Outputs of every document, and the gradients of inputs and weights, by the plan ``text``."""
    import torch

    from megatron_epp.ir import Kind, Plan, slices_of
    from megatron_epp.layers.chunk_state import ChunkState, chunk_rows, store_for

    plan = Plan.parse(text)
    slices = slices_of(plan)
    store, losses = store_for(plan, slices, stores_last_slice=False), {}
    leaves = [one.clone().requires_grad_() for one in inputs]
    for weight in layer.weights:
        weight.requires_grad_().grad = None
    outputs = [torch.zeros_like(one) for one in factors]
    for op in plan.orders[0]:
        if op.kind is not Kind.FORWARD:
            losses[op.chunk].backward()
            continue
        rows = chunk_rows(plan, slices, op.chunk)
        spans = [(r, slice(r.span.start, r.span.stop)) for r in rows]
        state = ChunkState(op.chunk, rows, rows[-1].stop, "k", store)
        y = layer.run(torch.cat([leaves[r.span.document][span] for r, span in spans]), state)
        parts = []
        for r, span in spans:
            outputs[r.span.document][span] = y[r.start : r.stop].detach()
            parts.append((y[r.start : r.stop] * factors[r.span.document][span]).sum())
        losses[op.chunk] = torch.stack(parts).sum()
    assert not len(store), "states outlive their documents"
    return [*outputs, *(one.grad for one in (*leaves, *layer.weights))]


def errors_of(layer: Any, stand_in: Any, case: Case) -> tuple[float, float]:
    """The largest errors of slices against whole documents, and of these against the stand-in's,
    over outputs and gradients."""
    import torch

    inputs = [layer.inputs(rows) for rows in case.lengths]
    factors = [torch.randn(rows, HEADS, VALUES) for rows in case.lengths]
    whole = computed(layer, case.whole, inputs, factors)
    sliced = computed(layer, case.cut, inputs, factors)
    for mine, theirs in zip(stand_in.weights, layer.weights, strict=True):
        mine.data.copy_(theirs.data)
    other = computed(stand_in, case.whole, inputs, factors)

    def worst(found: list[Any], wanted: list[Any]) -> float:
        pairs = zip(found, wanted, strict=True)
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)

    return worst(sliced, whole), worst(whole, other)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}")
    parser.add_argument("--packages", type=Path, required=True, help="folder that they lie in")
    args = parser.parse_args()
    wanted = args.names or list(CASES)
    for name in wanted:
        if name not in CASES:
            parser.error(f"no kernel {name!r}; known: {', '.join(CASES)}")
    try:
        kernels = load_kernels(args.packages, wanted)
    except ImportError as error:
        print(f"skipped: {error}; --packages {args.packages} lacks it (see --help)")
        return 0
    sys.path[:0] = [str(ROOT)]
    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()
    import torch

    from megatron_epp.mcore.patching.cpu_kernels import (
        chunk_gated_delta_rule,
        mamba_split_conv1d_scan_combined,
    )

    layers: dict[str, tuple[Any, Any]] = {
        "mamba": (MambaLayer, mamba_split_conv1d_scan_combined),
        "delta": (DeltaLayer, chunk_gated_delta_rule),
    }
    failed = 0
    for name in wanted:
        kind, stand_in = layers[name]
        for case in CASES[name]:
            torch.manual_seed(1)
            began = time.monotonic()
            other, layer = kind(stand_in), kind(kernels[name])
            sliced, whole = errors_of(layer, other, case)
            failed += max(sliced, whole) > BOUND
            print(
                f"{name}, {case}: slices differ from whole documents by {sliced:.1e}, these from "
                f"torch's by {whole:.1e} ({time.monotonic() - began:.0f} s)",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
