"""A kind of layer with a state, from Megatron's flags to its gradients: the files that it touches,
and who says which of them was forgotten (CONTRIBUTING, "Add a kind of layer").

It is priced and planned for in tests/cost/test_new_layer_kind.py; here it is written into a copy of
the package, is read from a pattern, put into a layer, and computes slices of a document.
"""

import inspect
import re
import shutil
from pathlib import Path

import pytest

from megatron_epp.cost.kinds.base import CarryOver
from megatron_epp.cost.kinds.layer import PARTS, Layer
from megatron_epp.mcore.kinds.attention.kind import AttentionKind
from megatron_epp.mcore.kinds.base import KindModule, LayerKind
from megatron_epp.mcore.kinds.moe.kind import MoEKind
from megatron_epp.mcore.kinds.registry import LAYER_KINDS
from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

from megatron_epp.mcore.kinds.attention.module import AttentionModule  # noqa: E402
from megatron_epp.mcore.kinds.modules import KIND_MODULES  # noqa: E402
from scripts.kind_files import put_back, take_out  # noqa: E402
from tests.cost.test_new_layer_kind import (  # noqa: E402
    MODELS,
    SHAPES,
    Blocks,
    DecayedSum,
    SumSizes,
)
from tests.forks import run_with_torch  # noqa: E402
from tests.ir.edited_copy import PACKAGE, run_with  # noqa: E402
from tests.mcore.models import V3  # noqa: E402
from tests.programs import run  # noqa: E402

pytestmark = pytest.mark.everything

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"
PRICED = f"""from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
import numpy as np
from megatron_epp.cost.columns import Column
from megatron_epp.cost.kinds.base import CarryOver, Part, RecomputedModule, Sizes, Work
HEADS, TAPS = 2, 3
{inspect.getsource(Blocks)}
BLOCKS = Blocks(256)
@dataclass(frozen=True)
{inspect.getsource(SumSizes).removeprefix("@dataclass(frozen=True)")}
{inspect.getsource(DecayedSum)}
"""
ON_CHUNKS = '''import torch
from torch import Tensor
from megatron_epp.runtime.kv_store import Store
TAPS, LAYER = 2, 0  # rows before a boundary; of the stage


def mixed(x_TS: Tensor, decay_S: Tensor, state_S: Tensor, tail_PS: Tensor) -> tuple[Tensor, ...]:
    """A convolution over rows and what stands before them, and a decaying sum: the outputs, and
    what the next slice begins with."""
    rows_S = torch.cat((tail_PS, x_TS))
    outputs = []
    for row in range(len(x_TS)):
        state_S = decay_S * state_S + rows_S[row : row + TAPS + 1].sum(0).tanh()
        outputs.append(state_S)
    return torch.stack(outputs), state_S, rows_S[len(rows_S) - TAPS :]


class Take(torch.autograd.Function):
    """The state at boundary ``boundary``, from the store; its gradient goes there."""

    @staticmethod
    def forward(ctx, anchor: Tensor, store: Store, boundary: int):
        ctx.store, ctx.boundary = store, boundary
        return tuple(part[0].clone() for part in store.context(LAYER, 0, boundary + 1, boundary))

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        ctx.store.add_window_gradient(LAYER, 0, ctx.boundary, *(g[None] for g in gradients))
        return None, None, None


class Keep(torch.autograd.Function):
    """``outputs`` as they are, the state behind them into the store; backward finds what the next
    slice left for it."""

    @staticmethod
    def forward(ctx, outputs: Tensor, state: Tensor, tail: Tensor, store: Store, boundary: int):
        ctx.store, ctx.boundary = store, boundary
        rows = len(store.boundaries[0])
        store.append(LAYER, 0, boundary, state[None], tail[None], rows)
        return outputs.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        store, boundary = ctx.store, ctx.boundary
        found = store.gradient(LAYER, 0, boundary, boundary + 1)
        of_state, of_tail = (part[0].clone() for part in found)
        if boundary == 0:
            store.release(LAYER, 0)
        return gradient, of_state, of_tail, None, None
'''
KIND = """
from megatron_epp.cost.kinds.sums import DecayedSum
from megatron_epp.mcore.kinds.base import LayerKind
from megatron_epp.mcore.kinds.limit import Limit

class SumsKind(LayerKind):
    PRICED, NAME, SYMBOL, SLOT = DecayedSum, "decayed sum", "S", "mixer"
    TIMED = {"layernorm": "norm"}
    LIMITS = (Limit("decayed sums over context-parallel ranks (--context-parallel-size)",
                    "leave it out", lambda args: args.context_parallel_size > 1),)

    def sizes(self, args):
        return {"sum_size": args.sum_size}
"""
MODULE = """
import torch
from megatron_epp.cost.kinds.sums import HEADS
from megatron_epp.layers.sums import Keep, Take, mixed
from megatron_epp.mcore.kinds.base import KeptShapes, KindModule
from megatron_epp.mcore.kinds.sums.kind import SumsKind

class SumsModule(KindModule):
    KIND = SumsKind()

    def holds(self, module):
        return type(module).__name__ == "SumMixer"

    def install(self, place):
        mixer = place.layer.mixer

        def forward(x, packed_seq_params):
            state = packed_seq_params
            (rows,), store = state.rows, state.store
            span, boundaries = rows.span, store.boundaries[rows.span.document]
            carried = x.new_zeros(x.shape[1:]), x.new_zeros(2, *x.shape[1:])
            if span.start:
                carried = Take.apply(mixer.decay, store, boundaries.index(span.start))
            outputs, *after = mixed(x, mixer.decay, *carried)
            if not rows.last:
                outputs = Keep.apply(outputs, *after, store, boundaries.index(span.stop))
            return outputs

        mixer.forward = forward

    def kept_shapes(self, layer, context):
        return KeptShapes(((1, HEADS, 3), (1, 2, HEADS, 3)))
"""
CERTIFICATE = """
from megatron_epp.mcore.kinds.certificate_base import LayerCertificate
from megatron_epp.mcore.kinds.sums.kind import SumsKind

class SumsCertificate(LayerCertificate):
    KIND = SumsKind()

    def small(self, args, hidden, tp, head_size, step=1):
        return {"sum_size": min(args.sum_size, 4)}
"""
# By file what is written and before which line; nothing: the file is new.
SUMS = {
    "cost/kinds/sums.py": [("", PRICED)],
    "layers/sums.py": [("", ON_CHUNKS)],
    "mcore/kinds/sums/__init__.py": [("", '"""Decayed sums."""')],
    "mcore/kinds/sums/kind.py": [("", KIND)],
    "mcore/kinds/sums/module.py": [("", MODULE)],
    "mcore/kinds/sums/certificate.py": [("", CERTIFICATE)],
    "cost/kinds/layer.py": [
        ("\nPARTS: tuple", "from megatron_epp.cost.kinds.sums import DecayedSum, SumSizes\n"),
        ("    MoESizes,\n):", "    SumSizes,\n"),
        ("    AttentionPart,\n", "    DecayedSum,\n"),
    ],
    "mcore/kinds/registry.py": [
        (
            "from megatron_epp.mcore.kinds.window.kind import",
            "from megatron_epp.mcore.kinds.sums.kind import SumsKind\n",
        ),
        ("    WindowKind(),\n", "    SumsKind(),\n"),
    ],
    "mcore/kinds/modules.py": [
        (
            "\n# Most specific kinds first",
            "from megatron_epp.mcore.kinds.sums.module import SumsModule\n",
        ),
        ("    AttentionModule(),\n", "    SumsModule(),\n"),
    ],
    "mcore/kinds/certificates.py": [
        (
            "from megatron_epp.mcore.kinds.window.certificate import",
            "from megatron_epp.mcore.kinds.sums.certificate import SumsCertificate\n",
        ),
        ("    WindowCertificate(),\n", "    SumsCertificate(),\n"),
    ],
}
NEW = [name for name in SUMS if not (PACKAGE / name).exists()]
USE = """
from argparse import Namespace
from types import SimpleNamespace
from megatron_epp.mcore.capabilities.table import limit_for
from megatron_epp.mcore.kinds.registry import model_sizes, require_pattern
from megatron_epp.mcore.model.shape import model_shape

args = Namespace(
    hybrid_layer_pattern="S*S-", num_layers=4, hidden_size=64, ffn_hidden_size=128,
    num_attention_heads=4, num_query_groups=2, group_query_attention=True, kv_channels=16,
    padded_vocab_size=1000, swiglu=True,
    untie_embeddings_and_output_weights=True, num_experts=None, window_size=None, sum_size=16,
    multi_latent_attention=False, context_parallel_size=2, attention_dropout=0.0, seq_length=512,
    pipeline_model_parallel_size=1, decoder_first_pipeline_num_layers=None,
    decoder_last_pipeline_num_layers=None, calculate_per_token_loss=True,
    position_embedding_type="rope",
)
require_pattern(args)
made = model_shape(args)
assert made.layer_kinds == ("sum", "attention", "sum", "mlp"), made.layer_kinds
assert made.shapes["sum"].carried.state == 2 * 16
refused = "--epp does not run decayed sums over context-parallel"
assert limit_for("training", args).startswith(refused)
args.context_parallel_size = 1
assert limit_for("training", args) is None

from megatron_epp.cost.analytic import profile
from megatron_epp.cost.build import even_layers
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layout import StageLayout
from megatron_epp.planner import PLANNERS, Options
coefficients = profile(made, DEVICES["cpu"])
layout = StageLayout(coefficients, even_layers(4, 2), layer_kinds=made.layer_kinds)
cost = Cost(layout, (1e12,) * 2)
assert PLANNERS["epp"]([900, 300], cost, Options(effort=0)).fits

from megatron_epp.mcore.patching import cpu_host
cpu_host.install_cpu_host()
import torch
from megatron_epp.ir import Kind, Plan, slices_of
from megatron_epp.layers.chunk_state import ChunkState, chunk_rows, store_for
from megatron_epp.mcore.kinds.base import LayerPlace
from megatron_epp.mcore.kinds.certificates import LAYER_CERTIFICATES
from megatron_epp.mcore.kinds.modules import kinds_of_layer
(certificate,) = (one for one in LAYER_CERTIFICATES if one.KIND.SYMBOL == "S")
assert certificate.small(args, 64, 1, 8) == {"sum_size": 4}

class SumMixer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.decay = torch.nn.Parameter(torch.rand(2, 3, dtype=torch.float64))

class Hyena(torch.nn.Module):
    pass

try:
    kinds_of_layer(SimpleNamespace(layer_number=3, mixer=Hyena()))
except ValueError as error:
    assert str(error) == (
        "layer 3: its mixer is a Hyena, a kind that --epp does not run; expected attention, latent "
        "attention, sparse attention, Mamba, gated delta net, MLP, experts, decayed sum"), error
else:
    raise AssertionError("Hyena ran")
layer = SimpleNamespace(layer_number=1, mixer=SumMixer())
(kind,) = kinds_of_layer(layer)
kind.install(LayerPlace(layer, 0, 512, None, None))
plan = Plan.parse('''plan v1
documents 12
layers 1
chunk 0: 0[0:5]
chunk 1: 0[5:12]
recompute 0: 1k 1k
stage 0: F0 F1 B1 B0
''')
torch.manual_seed(1)
x = torch.randn(12, 2, 3, dtype=torch.float64, requires_grad=True)
store, losses = store_for(plan, slices_of(plan), stores_last_slice=False), {}
for op in plan.orders[0]:
    (rows,) = chunk_rows(plan, slices_of(plan), op.chunk)
    span = slice(rows.span.start, rows.span.stop)
    if op.kind is Kind.FORWARD:
        state = SimpleNamespace(rows=(rows,), store=store)
        losses[op.chunk] = layer.mixer(x[span], state).pow(2).sum()
    else:
        losses[op.chunk].backward()
sliced, x.grad, decay = x.grad, None, layer.mixer.decay.grad
layer.mixer.decay.grad = None
from megatron_epp.layers.sums import mixed
nothing = torch.zeros(2, 3).double(), torch.zeros(2, 2, 3).double()
mixed(x, layer.mixer.decay, *nothing)[0].pow(2).sum().backward()
torch.testing.assert_close(sliced, x.grad, rtol=1e-12, atol=1e-12)
torch.testing.assert_close(decay, layer.mixer.decay.grad, rtol=1e-12, atol=1e-12)
assert kind.kept_shapes(layer, 512).shapes[0] == (1, 2, 3) and not len(store)
print("all of it")
"""


def test_it_is_six_new_files_and_four_changed_ones(tmp_path: Path) -> None:
    # A recompute letter of its own: ir/recompute.py, layers/recompute/wrap.py.
    assert len(NEW) == 6 and len(SUMS) - len(NEW) == 4
    done = run_with(SUMS, USE, tmp_path, without=())
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all of it" in done.stdout


@pytest.mark.parametrize(
    ("forgotten", "said"),
    [
        ("cost/kinds/sums.py", "No module named 'megatron_epp.cost.kinds.sums'"),
        ("cost/kinds/layer.py", "unexpected keyword argument 'sum_size'"),
        ("mcore/kinds/sums/kind.py", "No module named 'megatron_epp.mcore.kinds.sums.kind'"),
        (
            "mcore/kinds/registry.py",
            "--hybrid-layer-pattern S*S-: 'S' is not a layer symbol; expected a letter for",
        ),
        ("mcore/kinds/modules.py", "its mixer is a SumMixer, a kind that --epp does not run"),
        ("mcore/kinds/certificates.py", "not enough values to unpack (expected 1, got 0)"),
    ],
)
def test_a_forgotten_place_is_named(tmp_path: Path, forgotten: str, said: str) -> None:
    edits = {name: changes for name, changes in SUMS.items() if name != forgotten}
    done = run_with(edits, USE, tmp_path, without=())
    assert done.returncode != 0
    assert said in done.stderr, done.stderr[-2000:]


# --- a kind that is there, taken out and put back -------------------------------------------------

WITHOUT_DSA = """
from importlib import import_module
from pathlib import Path
from megatron_epp.mcore.patching import cpu_host
cpu_host.install_cpu_host()
root = Path(FOLDER)
for path in sorted(root.rglob("*.py")):
    parts = path.relative_to(root.parent).with_suffix("").parts
    if parts[-1] not in ("__main__", "pretrain_gpt", "pretrain_hybrid"):
        import_module(".".join(parts).removesuffix(".__init__"))
from megatron_epp.mcore.kinds.registry import SYMBOLS
assert "D" not in SYMBOLS and "+" in SYMBOLS

from megatron_epp.cost.analytic import profile
from megatron_epp.cost.build import even_layers
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.catalogue.models import MODELS
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.layout import StageLayout
from megatron_epp.planner import PLANNERS, Options
v3 = MODELS["deepseek-v3"]
coefficients = profile(v3, DEVICES["cpu"])
layout = StageLayout(coefficients, even_layers(61, 2), layer_kinds=v3.layer_kinds)
cost = Cost(layout, (1e15,) * 2)
assert PLANNERS["epp"]([900, 300], cost, Options(effort=0)).fits

from megatron_epp.certify.degrees import Degrees
from megatron_epp.mcore.certify.model_flags import parsed, scaled
small = scaled(parsed(FLAGS, 1), Degrees(pp=1, tp=1, dp=1), overlap=False)
assert 0 < small.elastic.kv_lora_rank < 256
print("all of it")
"""


# What published models' config.json calls a kind, and Megatron's flags for it.
READERS = {f"cost/catalogue/{name}.py" for name in ("hub_families", "hub_shape", "megatron_flags")}


def test_dsa_is_six_files_and_lines_in_four(tmp_path: Path) -> None:
    """Taken out of a copy: what is left imports, plans, and makes another kind small for a
    certificate. Put back: it is the package."""
    copy = tmp_path / "megatron_epp"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    taken = take_out("dsa", copy)
    said = CONTRIBUTING.read_text()
    assert len(taken.files) == 6 and len(taken.lines) <= 4, taken
    assert {name.replace("dsa", "sums") for name in taken.files} == set(NEW)
    assert {*taken.lines} == {*SUMS} - {*NEW}
    listed = [name.replace("dsa", "NAME") for name in taken.files] + [*taken.lines]
    assert [name for name in listed if f"`{name}`" not in said] == []
    left = {
        str(path.relative_to(copy))
        for path in copy.rglob("*.py")
        if re.search("dsa|DSA", path.read_text())
    }
    assert left == READERS and all(f"`{name}`" in said for name in READERS)
    program = WITHOUT_DSA.replace("FOLDER", repr(str(copy))).replace(
        "FLAGS", repr([*V3.split(), *["--num-layers", "2"]])
    )
    done = run_with_torch(program, tmp_path, {"NUMBA_DISABLE_JIT": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all of it" in done.stdout
    put_back(taken, copy)
    compared = run("diff", "-r", "-x", "__pycache__", PACKAGE, copy)
    assert compared.stdout == "" and compared.returncode == 0


# --- what a class forgot --------------------------------------------------------------------------


def owed(kind: LayerKind) -> list[str]:
    """The answers that ``kind``, or its module, owes and does not give."""
    model = MODELS["llama3-8b"]
    priced = [one for shape in SHAPES for one in Layer(model, shape).parts]
    carries = any(type(one) is kind.PRICED and one.carried != CarryOver() for one in priced)
    owes = ["sizes"] * (kind.PRICED not in (AttentionKind.PRICED, None) and not kind.ABSENT)
    missing = [name for name in owes if getattr(type(kind), name) is getattr(LayerKind, name)]
    # A framework's own layer has neither price nor letter.
    names = ("NAME", "SYMBOL") if kind.PRICED else ("NAME",)
    missing += [name for name in names if kind.SLOT and not getattr(kind, name)]
    if not kind.SLOT:
        return missing
    modules = {type(module.KIND): type(module) for module in KIND_MODULES}
    module = modules.get(type(kind), KindModule)
    owes = ["holds", "install"] + ["kept_shapes"] * carries + ["local_layer"] * bool(kind.STACK)
    return missing + [name for name in owes if getattr(module, name) is getattr(KindModule, name)]


def test_every_kind_gives_its_answers() -> None:
    assert {kind.PRICED for kind in LAYER_KINDS} - {None} == set(PARTS)
    assert [(kind, owed(kind)) for kind in LAYER_KINDS if owed(kind)] == []


@pytest.mark.parametrize("answer", ["sizes", "NAME", "SYMBOL"])
def test_an_answer_that_is_forgotten_is_named(answer: str, monkeypatch) -> None:
    monkeypatch.delattr(MoEKind, answer)
    assert owed(MoEKind()) == [answer]


@pytest.mark.parametrize("answer", ["holds", "install", "kept_shapes", "local_layer"])
def test_an_answer_of_a_module_that_is_forgotten_is_named(answer: str, monkeypatch) -> None:
    monkeypatch.delattr(AttentionModule, answer)
    assert owed(AttentionKind()) == [answer]
