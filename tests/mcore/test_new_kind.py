"""A kind of layer with a state, from Megatron's flags to its gradients: the files that it touches,
and who says which of them was forgotten (CONTRIBUTING, "Add a kind of layer").

It is priced and planned for in tests/cost/test_new_layer_kind.py; here it is written into a copy of
the package, is read from a pattern, put into a layer, and computes slices of a document.
"""

import inspect
from pathlib import Path

import pytest
from tests.layers.test_carried_states import Keep, Take, mixed

from megatron_epp.cost.kinds.base import CarryOver
from megatron_epp.cost.kinds.layer import PARTS, Layer
from megatron_epp.mcore.model.kinds.base import MegatronPart
from megatron_epp.mcore.model.kinds.experts import MegatronExperts
from megatron_epp.mcore.model.kinds.registry import MEGATRON_PARTS
from megatron_epp.mcore.model.kinds.self_attention import MegatronAttention
from tests.cost.test_new_layer_kind import MODELS, SHAPES, DecayedSum, SumSizes
from tests.ir.edited_copy import run_with

PRICED = f"""from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from megatron_epp.cost.kinds.base import CarryOver, Part, RecomputedModule, Sizes
HEADS, TAPS = 2, 3
@dataclass(frozen=True)
{inspect.getsource(SumSizes).removeprefix("@dataclass(frozen=True)")}
{inspect.getsource(DecayedSum)}
"""
ON_CHUNKS = f"""import torch
from torch import Tensor
from megatron_epp.runtime.kv_store import Store
TAPS, LAYER = 2, 0  # rows in front of a border; of the stage
{inspect.getsource(mixed)}
{inspect.getsource(Take)}
{inspect.getsource(Keep)}
"""
IN_MEGATRON = """
from megatron_epp.cost.kinds.sums import HEADS, DecayedSum
from megatron_epp.mcore.model.kinds.base import MegatronPart
from megatron_epp.mcore.model.limit import Limit

class MegatronSums(MegatronPart):
    PRICED, NAME, LETTER, SLOT = DecayedSum, "decayed sum", "S", "mixer"
    TIMED = {"layernorm": "norm"}
    LIMITS = (Limit("decayed sums over context-parallel ranks (--context-parallel-size)",
                    "leave it out", lambda args: args.context_parallel_size > 1),)

    def sizes(self, args):
        return {"sum_size": args.sum_size}

    def in_layers(self, args, mask):
        return {}

    def small(self, args, hidden, tp, head_size, step):
        return {"sum_size": min(args.sum_size, 4)}

    def holds(self, module):
        return type(module).__name__ == "SumMixer"

    def install(self, place):
        from megatron_epp.mcore.model.sum_mixer import install_sums
        install_sums(place)

    def kept_shapes(self, layer, context):
        return (1, HEADS, 3), (1, 2, HEADS, 3)
"""
MIXER = """
import torch
from megatron_epp.layers.sums import Keep, Take, mixed

def install_sums(place):
    mixer = place.layer.mixer

    def forward(x, packed_seq_params):
        state = packed_seq_params
        (rows,), store = state.rows, state.store
        span, borders = rows.span, store.borders[rows.span.document]
        carried = x.new_zeros(x.shape[1:]), x.new_zeros(2, *x.shape[1:])
        if span.start:
            carried = Take.apply(mixer.decay, store, borders.index(span.start))
        outputs, *after = mixed(x, mixer.decay, *carried)
        if not rows.last:
            outputs = Keep.apply(outputs, *after, store, borders.index(span.stop))
        return outputs

    mixer.forward = forward
"""
# By file what is written and before which line; nothing: the file is new.
SUMS = {
    "cost/kinds/sums.py": [("", PRICED)],
    "cost/kinds/layer.py": [
        (
            "\nPARTS: tuple",
            "from megatron_epp.cost.kinds.sums import DecayedSum, SumSizes\n",
        ),
        ("ExpertSizes):\n", "SumSizes, "),
        ("    AttentionPart,\n", "    DecayedSum,\n"),
    ],
    "layers/sums.py": [("", ON_CHUNKS)],
    "mcore/model/sum_mixer.py": [("", MIXER)],
    "mcore/model/kinds/sums.py": [("", IN_MEGATRON)],
    "mcore/model/kinds/registry.py": [
        (
            "from megatron_epp.mcore.model.kinds.window import",
            "from megatron_epp.mcore.model.kinds.sums import MegatronSums\n",
        ),
        ("    MegatronWindow(),\n", "    MegatronSums(),\n"),
    ],
}
USE = """
from argparse import Namespace
from types import SimpleNamespace
from megatron_epp.mcore.capabilities.table import limit_for
from megatron_epp.mcore.model.kinds.registry import layer_parts, model_sizes, require_pattern
from megatron_epp.mcore.model.shape import model_shape

args = Namespace(
    hybrid_layer_pattern="S*S-", num_layers=4, hidden_size=64, ffn_hidden_size=128,
    num_attention_heads=4, num_query_groups=2, kv_channels=16, padded_vocab_size=1000, swiglu=True,
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
assert limit_for("epp", args).startswith("--epp does not run decayed sums over context-parallel")
args.context_parallel_size = 1
assert limit_for("epp", args) is None

from megatron_epp.cost.analytic import profile
from megatron_epp.cost.build import even_layers
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.cost import Cost
from megatron_epp.planner import PLANNERS, Options
figures = profile(made, DEVICES["cpu"])
cost = Cost(figures, even_layers(4, 2), (1e12,) * 2, layer_kinds=made.layer_kinds)
assert PLANNERS["epp"]([900, 300], cost, Options(effort=0)).fits

from megatron_epp.mcore.patching import cpu_host
cpu_host.install_cpu_host()
import torch
from megatron_epp.ir import Kind, Plan, slices_of
from megatron_epp.layers.chunk_state import ChunkState, chunk_rows, store_for
from megatron_epp.mcore.model.kinds.base import LayerPlace

class SumMixer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.decay = torch.nn.Parameter(torch.rand(2, 3, dtype=torch.float64))

class Hyena(torch.nn.Module):
    pass

try:
    layer_parts(SimpleNamespace(layer_number=3, mixer=Hyena()))
except ValueError as error:
    assert str(error) == (
        "layer 3: its mixer is a Hyena, a kind that --epp does not run; expected attention, latent "
        "attention, sparse attention, Mamba, gated delta net, MLP, experts, decayed sum"), error
else:
    raise AssertionError("Hyena ran")
layer = SimpleNamespace(layer_number=1, mixer=SumMixer())
(part,) = layer_parts(layer)
part.install(LayerPlace(layer, 0, 512, None, None))
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
assert part.kept_shapes(layer, 512)[0] == (1, 2, 3) and not len(store)
print("all of it")
"""


def test_it_touches_twelve_files_at_most(tmp_path: Path) -> None:
    # A letter of its own: ir/recompute.py, layers/recompute/wrap.py. Its layer of Megatron's local
    # modules is the class's (local_layer).
    assert len(SUMS) + 2 <= 12
    done = run_with(SUMS, USE, tmp_path, without=())
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all of it" in done.stdout


@pytest.mark.parametrize(
    ("forgotten", "said"),
    [
        ("cost/kinds/sums.py", "No module named 'megatron_epp.cost.kinds.sums'"),
        ("cost/kinds/layer.py", "unexpected keyword argument 'sum_size'"),
        ("mcore/model/kinds/sums.py", "No module named 'megatron_epp.mcore.model.kinds.sums'"),
        (
            "mcore/model/kinds/registry.py",
            "--hybrid-layer-pattern S*S-: 'S' stands for no layer; expected a letter for",
        ),
    ],
)
def test_a_forgotten_place_is_named(tmp_path: Path, forgotten: str, said: str) -> None:
    edits = {name: changes for name, changes in SUMS.items() if name != forgotten}
    done = run_with(edits, USE, tmp_path, without=())
    assert done.returncode != 0
    assert said in done.stderr, done.stderr[-2000:]


# --- what a class forgot --------------------------------------------------------------------------


def owed(part: MegatronPart) -> list[str]:
    """The answers that ``part`` owes and does not give."""
    model = MODELS["llama3-8b"]
    priced = [one for shape in SHAPES for one in Layer(model, shape).parts]
    carries = any(type(one) is part.PRICED and one.carried != CarryOver() for one in priced)
    owes = ["holds", "install"] * bool(part.SLOT) + ["kept_shapes"] * carries
    owes += ["local_layer"] * bool(part.STACK)
    owes += ["sizes"] * (part.PRICED not in (MegatronAttention.PRICED, None) and not part.ABSENT)
    missing = [name for name in owes if getattr(type(part), name) is getattr(MegatronPart, name)]
    # A framework's own layer has neither price nor letter.
    names = ("NAME", "LETTER") if part.PRICED else ("NAME",)
    return missing + [name for name in names if part.SLOT and not getattr(part, name)]


def test_every_part_gives_its_answers() -> None:
    assert {part.PRICED for part in MEGATRON_PARTS} - {None} == set(PARTS)
    assert [(part, owed(part)) for part in MEGATRON_PARTS if owed(part)] == []


@pytest.mark.parametrize("answer", ["holds", "install", "sizes", "NAME", "LETTER"])
def test_an_answer_that_is_forgotten_is_named(answer: str, monkeypatch) -> None:
    monkeypatch.delattr(MegatronExperts, answer)
    assert owed(MegatronExperts()) == [answer]


def test_what_a_kind_carries_is_asked_of_it(monkeypatch) -> None:
    monkeypatch.delattr(MegatronAttention, "kept_shapes")
    assert owed(MegatronAttention()) == ["kept_shapes"]
