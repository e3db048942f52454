"""A kind of layer, taken out of a copy of the package and put back: the files that it touches, and
who says which of them was forgotten (CONTRIBUTING, "Add a kind of layer").

What its part owes the cost model: tests/cost/test_new_layer_kind.py.
"""

import re
import shutil
from pathlib import Path

import pytest

from megatron_epp.cost.kinds.base import CarryOver
from megatron_epp.cost.kinds.layer import PARTS, Layer
from megatron_epp.mcore.kinds.attention.kind import AttentionKind
from megatron_epp.mcore.kinds.attention.module import AttentionModule
from megatron_epp.mcore.kinds.base import KindModule, LayerKind
from megatron_epp.mcore.kinds.modules import KIND_MODULES
from megatron_epp.mcore.kinds.moe.kind import MoEKind
from megatron_epp.mcore.kinds.registry import LAYER_KINDS
from scripts.kind_files import PACKAGE, KindFiles, put_back, take_out
from tests.cost.test_new_layer_kind import MODELS, SHAPES
from tests.forks import Ended, run_with_torch
from tests.mcore.models import INDEXER, MLA, PATTERN, V3
from tests.programs import run

pytestmark = pytest.mark.everything

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"
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
from megatron_epp.planner.options import Options
from megatron_epp.planner.registry import PLANNERS
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

WITH_DSA = """
from types import SimpleNamespace
from megatron_epp.mcore.patching import cpu_host
cpu_host.install_cpu_host()
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import (
    AbsorbedMLASelfAttention,
)
from megatron_epp.certify.degrees import Degrees
from megatron_epp.mcore.certify.model_flags import parsed, scaled
from megatron_epp.mcore.kinds.modules import kinds_of_layer
from megatron_epp.mcore.model.shape import model_shape
small = scaled(parsed(FLAGS, 1), Degrees(pp=1, tp=1, dp=1), overlap=False)
assert model_shape(small.elastic).shapes
attention = object.__new__(AbsorbedMLASelfAttention)
(kind,) = kinds_of_layer(SimpleNamespace(layer_number=1, self_attention=attention))
assert "dsa" in type(kind).__module__, "its layers are taken for those of another kind"
assert small.elastic.dsa_indexer_topk < 2048, "the indexer has its full size"
print("all of it")
"""


# What published models' config.json calls a kind, and Megatron's flags for it.
READERS = {f"cost/catalogue/{name}.py" for name in ("hub_families", "hub_shape", "megatron_flags")}


def taken_out(folder: Path) -> tuple[Path, KindFiles]:
    """A copy of the package without DSA, and what was taken out."""
    copy = folder / "megatron_epp"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy, take_out("dsa", copy)


def ran(program: str, folder: Path, flags: str) -> Ended:
    program = program.replace("FOLDER", repr(str(folder / "megatron_epp")))
    program = program.replace("FLAGS", repr(flags.split()))
    return run_with_torch(program, folder, {"NUMBA_DISABLE_JIT": "1"})


def test_dsa_is_six_files_and_lines_in_four(tmp_path: Path) -> None:
    """Taken out of a copy: what is left imports, plans, and makes another kind small for a
    certificate. Put back: it is the package."""
    copy, taken = taken_out(tmp_path)
    said = CONTRIBUTING.read_text()
    assert len(taken.files) == 6 and len(taken.lines) <= 4, taken
    listed = [name.replace("dsa", "NAME") for name in taken.files] + [*taken.lines]
    assert [name for name in listed if f"`{name}`" not in said] == []
    left = {
        str(path.relative_to(copy))
        for path in copy.rglob("*.py")
        if re.search("dsa|DSA", path.read_text())
    }
    assert left == READERS and all(f"`{name}`" in said for name in READERS)
    done = ran(WITHOUT_DSA, tmp_path, f"{V3} --num-layers 2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all of it" in done.stdout
    put_back(taken, copy)
    compared = run("diff", "-r", "-x", "__pycache__", PACKAGE, copy)
    assert compared.stdout == "" and compared.returncode == 0


@pytest.mark.parametrize(
    ("forgotten", "said"),
    [
        (None, ""),
        ("cost/kinds/dsa.py", "No module named 'megatron_epp.cost.kinds.dsa'"),
        ("cost/kinds/layer.py", "unexpected keyword argument 'index_heads'"),
        ("layers/dsa.py", "cannot import name 'dsa' from 'megatron_epp.layers'"),
        ("mcore/kinds/dsa/kind.py", "No module named 'megatron_epp.mcore.kinds.dsa.kind'"),
        (
            "mcore/kinds/registry.py",
            "--hybrid-layer-pattern D-: 'D' is not a layer symbol; expected a letter for",
        ),
        ("mcore/kinds/modules.py", "its layers are taken for those of another kind"),
        ("mcore/kinds/certificates.py", "the indexer has its full size"),
    ],
)
def test_a_forgotten_place_is_named(tmp_path: Path, forgotten: str | None, said: str) -> None:
    copy, taken = taken_out(tmp_path)
    for places in (taken.files, taken.lines):
        places.pop(forgotten, None)
    put_back(taken, copy)
    done = ran(WITH_DSA, tmp_path, f"{MLA} --q-lora-rank 384 --rope-type rope {INDEXER}{PATTERN}D-")
    assert (done.returncode == 0) == (forgotten is None), done.stderr[-2000:]
    assert said in done.stderr, done.stderr[-2000:]


# --- what a class forgot --------------------------------------------------------------------------


def owed(kind: LayerKind) -> list[str]:
    """The answers that ``kind``, or its module, owes and does not give."""
    model = MODELS["llama3-8b"]
    parts = [Layer.of(model, shape).parts.get(kind.PRICED) for shape in SHAPES]
    carries = any(each is not None and each.carried != CarryOver() for each in parts)
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
