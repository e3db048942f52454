#!/usr/bin/env python3
"""Slices in original kernels of mamba_ssm and flash-linear-attention, on a host without a GPU.

    pip install --no-deps --target kernels fla-core==0.4.1 numpy==2.2.6
    MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE pip install --no-deps --no-build-isolation \
        --no-binary mamba-ssm --target kernels mamba-ssm==2.3.2.post1
    PYTHONPATH=kernels scripts/upstream/state_kernels.py [mamba] [delta]

Triton's interpreter runs the kernels on CPU tensors; with Triton 3.6, this requires numpy before
2.5. Megatron's own SSM and linear-attention layers compute documents whole and, with the adapters
of ``--epp``, in slices. A call contains slices together with unsliced documents, and passes states
and rows over boundaries. Both are in float32; the expected values are in float64, from the torch
kernels of CPU-only hosts (mcore/patching/cpu_kernels.py). The script prints errors of outputs and
gradients. It fails if the errors of slices are more than twice those of unsliced documents, or if
omitted gradients over boundaries remain undetected. mamba_ssm's convolution is CUDA C++; here torch
replaces it. The run takes half a minute.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, redirect_stdout
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_epp.certify.command import OWN_BOUND
from megatron_epp.layers.ssm.scans import causal_conv
from megatron_epp.runtime.kv_store import Store

PACKAGES, KINDS = ("mamba_ssm", "fla"), ("mamba", "delta")
GRADIENT = Store.gradient
FLAGS = """
    --num-layers 1 --hidden-size 32 --num-attention-heads 2 --swiglu --normalization RMSNorm
    --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --seq-length 128 --max-position-embeddings 128
    --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-4 --eval-iters 0
    --tokenizer-type NullTokenizer --vocab-size 127 --mamba-num-heads 2 --mamba-head-dim 16
    --mamba-num-groups 1 --mamba-state-dim 16
    --experimental-attention-variant gated_delta_net --linear-attention-freq 2
    --linear-num-key-heads 1 --linear-num-value-heads 2 --linear-key-head-dim 16
    --linear-value-head-dim 16 --init-method-std 0.3
"""
# A first slice shorter than a convolution sees, one behind a whole document, one of no more rows
# than a block, a last one with a whole document behind it; borders off the blocks of either kernel.
SLICED = """plan v1
replica 0 of 1
documents 90 20 40 9
layers 1
chunk 0: 0[0:2]
chunk 1: 1[0:20] 2[0:30]
chunk 2: 0[2:66]
chunk 3: 0[66:90] 3[0:9]
chunk 4: 2[30:40]
recompute 0: 1k 1k 1k 1k 1k
stage 0: F0 F1 F2 F3 F4 B4 B3 B2 B1 B0
"""


def missing() -> list[str]:
    """Return the names of packages that are not installed."""
    return [name for name in PACKAGES if find_spec(name) is None]


# ------------------------------------------------------------------ the kernels


def interpret() -> None:
    """Install substitutes for the device functions of the packages, before their import."""
    import triton

    tuned = triton.autotune
    # Nothing is tuned: every choice of blocks computes the same.
    triton.autotune = lambda configs, *others, **named: tuned(configs[:1], *others, **named)
    properties = {"multiprocessor_count": 1, "max_shared_mem": 0}
    utils = SimpleNamespace(get_device_properties=lambda index: properties)
    target = SimpleNamespace(backend="cpu")
    device: Any = SimpleNamespace(utils=utils, get_current_target=lambda: target)
    triton.runtime.driver.set_active(device)
    for host in (torch.cuda, torch.cpu):
        vars(host)["device"] = lambda index: nullcontext()
    # The package proper opens CUDA's libraries.
    found = find_spec("mamba_ssm")
    assert found is not None and found.submodule_search_locations
    package = sys.modules["mamba_ssm"] = ModuleType("mamba_ssm")
    package.__path__ = list(found.submodule_search_locations)
    package.__spec__ = found
    package.__dict__["__version__"] = "2.3.2"
    convolution: Any = ModuleType("causal_conv1d")
    convolution.__spec__, convolution.__path__ = ModuleSpec("causal_conv1d", None), []
    convolution.__version__, convolution.causal_conv1d_fn = "1.6.0", None
    functions: Any = ModuleType("causal_conv1d.cpp_functions")
    functions.causal_conv1d_fwd_function = convolve
    functions.causal_conv1d_bwd_function = convolve_backward
    functions.causal_conv1d_update_function = None
    varlen: Any = ModuleType("causal_conv1d.causal_conv1d_varlen")
    varlen.causal_conv1d_varlen_states = None
    for module in (convolution, functions, varlen):
        sys.modules[module.__name__] = module


def bind_late() -> None:
    """Replace Triton's functions that modules imported by name with those of the interpreter."""
    import triton.language as language

    def found_by(name: str) -> Callable[..., Any]:
        return lambda *values, **named: getattr(language, name)(*values, **named)

    for module in [one for name, one in sys.modules.items() if name.startswith("fla.")]:
        for name, value in list(vars(module).items()):
            if callable(value) and language.core.is_builtin(value):
                setattr(module, name, found_by(value.__name__))


def convolve(
    x_BCL: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor,
    seq_idx: Tensor | None,
    initial: None,
    final: None,
    silu: bool,
) -> Tensor:
    """Compute causal_conv1d's forward, separately for each sequence: [B, C, L]."""
    assert initial is None and final is None and silu
    made = []
    for batch, rows_LC in enumerate(x_BCL.transpose(1, 2)):
        lengths = [len(rows_LC)]
        if seq_idx is not None:
            lengths = torch.unique_consecutive(seq_idx[batch], return_counts=True)[1].tolist()
        parts = rows_LC.split(lengths)
        made.append(torch.cat([F.silu(causal_conv(part, weight_CW, bias_C)) for part in parts]))
    return torch.stack(made).transpose(1, 2)


def convolve_backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gradient: Tensor,
    seq_idx: Tensor | None,
    initial: None,
    of_final: None,
    out: Tensor,
    wants_initial: bool,
    silu: bool,
) -> tuple[Tensor, ...]:
    """Compute causal_conv1d's backward, with dx in ``out``: (dx, dweight, dbias)."""
    assert of_final is None and not wants_initial
    with torch.enable_grad():
        leaves = [one.detach().requires_grad_() for one in (x, weight, bias)]
        y = convolve(*leaves, seq_idx, initial, None, silu)
    dx, *others = torch.autograd.grad(y, leaves, gradient)
    return out.copy_(dx), *others


# ------------------------------------------------------------------ layers


def build(alone: Any, kind: str) -> Any:
    """Return a layer of Megatron that can also compute chunks."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module
    from megatron.training.argument_utils import gpt_config_from_args

    from megatron_epp.layers.recompute.outputs import DroppedOutputs
    from megatron_epp.mcore.kinds.base import LayerPlace
    from megatron_epp.mcore.kinds.modules import kinds_of_layer
    from megatron_epp.mcore.kinds.ssm.local import local_gated_delta_net, local_mamba

    config = gpt_config_from_args(alone.args).transformer
    spec = {"mamba": local_mamba, "delta": local_gated_delta_net}[kind](config)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    torch.manual_seed(7)
    layer = build_module(spec, config, layer_number=1, pg_collection=groups)
    for part in kinds_of_layer(layer):
        part.install(LayerPlace(layer, 0, 128, alone.attention, DroppedOutputs()))
    return layer


def whole(layer: Any, documents: Sequence[Tensor], factors: Sequence[Tensor]) -> list[Tensor]:
    """Return outputs of unsliced ``documents`` [T, 1, hidden]; accumulate gradients."""
    outputs = [output_of(layer, document, None) for document in documents]
    for output, factor in zip(outputs, factors, strict=True):
        (output * factor).sum().backward()
    return [output.detach() for output in outputs]


def sliced(layer: Any, documents: Sequence[Tensor], factors: Sequence[Tensor]) -> list[Tensor]:
    """Return outputs of ``documents``, computed in the chunks and order of the plan SLICED."""
    from megatron_epp.ir import Kind, Plan, slices_of
    from megatron_epp.layers.chunk_state import ChunkState, chunk_rows, store_for
    from megatron_epp.mcore.data.chunk_params import ChunkParams

    plan = Plan.parse(SLICED)
    slices = slices_of(plan)
    store = store_for(plan, slices, stores_last_slice=False)
    outputs, made = [torch.empty_like(document) for document in documents], {}
    for op in plan.orders[0]:
        if op.kind is not Kind.FORWARD:
            made.pop(op.chunk).backward()
            continue
        rows = chunk_rows(plan, slices, op.chunk)
        state = ChunkState(op.chunk, rows, rows[-1].stop, "k", store, True)
        places = torch.zeros(state.tokens, dtype=torch.int64)
        spans = [(row.span.document, slice(row.span.start, row.span.stop)) for row in rows]
        hidden = torch.cat([documents[document][span] for document, span in spans])
        output = output_of(layer, hidden, ChunkParams.of(state, places))
        made[op.chunk] = (output * torch.cat([factors[d][span] for d, span in spans])).sum()
        for row, (document, span) in zip(rows, spans, strict=True):
            outputs[document].data[span] = output.detach()[row.start : row.stop]
    assert not len(store), "a state was left behind"
    return [output.detach() for output in outputs]


def output_of(layer: Any, hidden: Tensor, params: Any) -> Tensor:
    made = layer(hidden, attention_mask=None, packed_seq_params=params)
    return made[0] if isinstance(made, tuple) else made


def computed(layer: Any, way: Callable[..., list[Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return outputs, and gradients of inputs and parameters, in float64."""
    from megatron_epp.ir import Plan

    layer.to(dtype)
    layer.zero_grad()
    layer.config.params_dtype = dtype
    lengths = Plan.parse(SLICED).documents
    draw = torch.Generator().manual_seed(11)
    documents, factors = (
        [torch.randn(n, 1, 32, generator=draw, dtype=torch.float32).to(dtype) for n in lengths]
        for _ in range(2)
    )
    for document in documents:
        document.requires_grad_()
    outputs = way(layer, documents, factors)
    found = {"output": torch.cat(outputs), "input": torch.cat([one.grad for one in documents])}
    found |= {name: one.grad for name, one in layer.named_parameters()}
    return {name: tensor.double().clone() for name, tensor in found.items()}


def by_stand_ins() -> Any:
    """Return a context in which Megatron's layers use the kernels of CPU-only hosts."""
    from megatron.core.ssm import mamba_mixer
    from megatron.core.ssm.gated_delta_net import common, gdn

    from megatron_epp.mcore.patching import cpu_host, cpu_kernels

    replaced = ExitStack()
    replaced.enter_context(cpu_host.double_precision())
    for holder, name in (
        (mamba_mixer, "mamba_split_conv1d_scan_combined"),
        (gdn, "causal_conv1d"),
        (common, "l2norm"),
    ):
        replaced.enter_context(patch.object(holder, name, getattr(cpu_kernels, name)))
    return replaced


def off(found: dict[str, Tensor], right: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest error of a tensor relative to its norm, and the tensor's name."""
    errors = {
        name: float((found[name] - tensor).norm() / tensor.norm()) for name, tensor in right.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst


def nothing(store: Any, *where: int) -> tuple[Tensor, ...]:
    """Return zeros in place of the gradients that later slices store for earlier slices."""
    return tuple(map(torch.zeros_like, GRADIENT(store, *where)))


def judge(alone: Any, kind: str) -> bool:
    """Print the errors of slices in a layer of ``kind``; return whether they are within bounds."""
    from megatron_epp.mcore.patching import cpu_kernels

    began = time.monotonic()
    layer = build(alone, kind)
    ours, plain = (computed(layer, way, torch.float32) for way in (sliced, whole))
    with patch.object(Store, "gradient", nothing):
        broken = computed(layer, sliced, torch.float32)
    with by_stand_ins():
        if kind == "delta":
            layer.self_attention.gated_delta_rule = cpu_kernels.chunk_gated_delta_rule
        right = computed(layer, whole, torch.float64)
    (of_slices, where), (of_whole, there) = off(ours, right), off(plain, right)
    shown = off(broken, right)[0]
    fine = of_slices <= OWN_BOUND * of_whole and shown > 1e3 * of_slices
    print(
        f"{kind}: slices {of_slices:.1e} ({where}), whole documents {of_whole:.1e} ({there}), "
        f"one beside the other {off(ours, plain)[0]:.1e}, no gradients over borders {shown:.1e}; "
        f"{len(right)} tensors, {time.monotonic() - began:.0f} s: "
        f"{'ok' if fine else 'NOT ok'}",
        flush=True,
    )
    return fine


def main(kinds: Sequence[str]) -> int:
    """Return 0 if slices match unsliced documents, 1 if not, 2 if a package is missing."""
    if lacking := missing():
        print(f"{' '.join(lacking)}: not installed; the first lines of this script say how")
        return 2
    interpret()
    from megatron_epp.mcore.patching import cpu_host

    with patch.object(cpu_host, "install_cpu_kernels", lambda: None):
        from scripts.bench.single_stage import start_single_process

        with redirect_stdout(sys.stderr):
            alone = start_single_process(FLAGS.split())
    from megatron.core.ssm import mamba_mixer

    bind_late()
    assert mamba_mixer.mamba_split_conv1d_scan_combined.__module__.startswith("mamba_ssm.")
    judged = [judge(alone, kind) for kind in kinds]
    return 0 if all(judged) else 1


if __name__ == "__main__":
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="mamba, delta")
    asked = parser.parse_args().kinds or list(KINDS)
    if unknown := [kind for kind in asked if kind not in KINDS]:
        parser.error(f"no kind {' '.join(unknown)}; there are: {' '.join(KINDS)}")
    sys.exit(main(asked))
