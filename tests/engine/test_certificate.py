"""The certificate in Transformer Engine's layers, with emulated kernels."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_epp.certify.batches import Frame, RandomBatch, modes_drawn
from megatron_epp.certify.command import OWN_BOUND, BatchVerdict, certify
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import BF16, GPT, LLAMA, Trial
from megatron_epp.ir import slices_of
from megatron_epp.layers.recompute.wrap import EXECUTABLE
from megatron_epp.mcore.certify.backend import MEGATRON, choose_engine
from megatron_epp.mcore.kinds.window.certificate import WINDOW
from megatron_epp.mcore.patching.emulated_engine import (
    DEVICE_VARIABLE,
    OF_CHECKOUT,
    VARIABLE,
    require,
)
from tests.certify.trial import CheckedTrial
from tests.mcore.certified import certified
from tests.mcore.fault_injection import first_seed, inject_alone, names, require_shown
from tests.programs import ROOT, python

pytestmark = pytest.mark.gpu

TABLE = Path(__file__).with_name("faults") / "engine.py"
ENGINE = " --transformer-impl transformer_engine"
DENSE = f"{LLAMA} --num-layers 2"
EXPERTS = (
    f"{DENSE} --qk-layernorm --num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 384 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 "
    "--moe-token-dispatcher-type alltoall --expert-tensor-parallel-size 1"
)
DEEPSEEK = (
    f"{DENSE} --num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 352 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3 "
    "--moe-shared-expert-intermediate-size 704 --moe-layer-freq ([0]*1+[1]*1) "
    "--moe-token-dispatcher-type alltoall --expert-tensor-parallel-size 1"
)
BIASED = (
    f"{GPT} --num-layers 2 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1 "
    "--moe-token-dispatcher-type alltoall --expert-tensor-parallel-size 1"
)
LATENTS = (
    "--num-layers 2 --hidden-size 512 --num-attention-heads 8 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --multi-latent-attention --kv-lora-rank 256 "
    "--qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 96 --qk-layernorm"
)
V3 = f"{LATENTS} --q-lora-rank 384 --rotary-scaling-factor 40 --mscale-all-dim 1.0"
LITE = f"{LATENTS} --v-head-dim 64 --rope-type rope --apply-layernorm-1p"  # values: fewer channels
HYBRID = f"{DEEPSEEK} --hybrid-layer-pattern=*-*E*-".replace("--moe-layer-freq ([0]*1+[1]*1) ", "")
GPT_OSS = (
    f"{LLAMA} --num-layers 2 --window-size 127,0 --window-attn-skip-freq 2 --softmax-type learnable"
)
GROUPED = " --moe-grouped-gemm"
SPREAD = " --sequence-parallel --expert-model-parallel-size 2"
PATTERN = " --hybrid-layer-pattern="


def models(*lines: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple((line + ENGINE).split()) for line in lines)


EVERY_DEGREE = {
    "one process": CheckedTrial(
        Degrees(1, 1, 1),
        models(
            DENSE, f"{GPT} --num-layers 2", EXPERTS, EXPERTS + GROUPED, V3, LITE, GPT_OSS, HYBRID
        ),
        batches=8,
    ),
    "tensor-parallel ranks": CheckedTrial(
        Degrees(1, 2, 1),
        models(
            f"{DENSE} --sequence-parallel",
            f"{GPT} --num-layers 2",
            EXPERTS + GROUPED + SPREAD,
            DEEPSEEK + SPREAD + " --moe-latent-size 256",
            BIASED + SPREAD,
            f"{V3} --sequence-parallel",
            LITE,
        ),
        batches=7,
        overlap=True,
    ),
    "stages and replicas": CheckedTrial(
        Degrees(2, 1, 2),
        models(
            f"{LLAMA} --num-layers 4 --epp-vocab-parallel on",
            f"{GPT} --num-layers 4",
            f"{DEEPSEEK}{PATTERN}*-*E|*-*E".replace("--moe-layer-freq ([0]*1+[1]*1) ", ""),
        ),
        batches=3,
        overlap=True,
    ),
    "experts over replicas": CheckedTrial(
        Degrees(1, 1, 2),
        models(f"{EXPERTS}{GROUPED} --expert-model-parallel-size 2"),
        batches=4,
        overlap=True,
    ),
    "context-parallel ranks": CheckedTrial(
        Degrees(1, 1, 1, cp=2), models(DENSE, V3, GPT_OSS), batches=6
    ),
    "slices of loops": CheckedTrial(
        Degrees(2, 1, 1), models(LLAMA + " --num-layers 4"), batches=4, loop=True
    ),
    "in bf16": CheckedTrial(
        Degrees(1, 1, 1),
        models(DENSE, EXPERTS + GROUPED, DEEPSEEK, V3, HYBRID),
        batches=10,
        dtype=BF16,
    ),
    "in bf16, over two stages": CheckedTrial(
        Degrees(2, 1, 1),
        models(f"{LLAMA} --num-layers 4 --epp-vocab-parallel on", f"{V3} --num-layers 4"),
        batches=4,
        overlap=True,
        dtype=BF16,
    ),
    "in bf16, prefixes": CheckedTrial(
        Degrees(1, 1, 1), models(DENSE), batches=2, trees=True, dtype=BF16
    ),
    "in bf16, slices of loops": CheckedTrial(
        Degrees(2, 1, 1), models(LLAMA + " --num-layers 4"), batches=4, loop=True, dtype=BF16
    ),
    "in bf16, slices of loops with prefixes": CheckedTrial(
        Degrees(1, 1, 1), models(DENSE), batches=2, loop=True, trees=True, dtype=BF16
    ),
}


@pytest.mark.parametrize("name", EVERY_DEGREE)
def test_random_plans_compute_what_the_plain_model_computes(name) -> None:
    trial = EVERY_DEGREE[name]
    lines, judged = certified(trial)
    assert lines[0].startswith("Transformer Engine's layers with emulated kernels")
    if not trial.loop and not trial.trees:
        seen = [batch.coverage for batch in judged]
        for what in ("split", "packed", "hybrid", "selective", "halved", "offloaded"):
            assert sum(getattr(one, what) for one in seen) > 0, what


def without_engine() -> dict[str, str]:
    """This environment, without the variables of the emulation."""
    ours = (VARIABLE, DEVICE_VARIABLE)
    return {name: value for name, value in os.environ.items() if name not in ours}


def by_command(words: str, device: str | None = None) -> list[str]:
    """Lines of ``certify`` with ``words``, from an environment that names ``device``, or none."""
    environment = without_engine() | ({DEVICE_VARIABLE: device} if device else {})
    done = python("-m", "megatron_epp", "certify", *words.split(), only=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def said(device: str) -> str:
    return f"Transformer Engine's layers with emulated kernels (EPP_ENGINE=tests.engine, {device})"


def test_the_command_has_its_processes_run_so() -> None:
    """On the device that the environment names; where it names none: test_fp8_certificate.py."""
    first, *_, last = by_command(f"--pp 1 --batches 1 {EXPERTS}{GROUPED}{ENGINE}", "b200")
    assert first == said("b200")
    assert re.match(r"certified: 1 batches, worst error .*e-1[56] ", last)


def test_an_h100_is_what_nobody_names(monkeypatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv(DEVICE_VARIABLE, "b200")
    assert require() == said("b200")
    monkeypatch.delenv(DEVICE_VARIABLE)
    assert require() == said("h100")
    # For the processes to come.
    assert (os.environ[VARIABLE], os.environ[DEVICE_VARIABLE]) == (OF_CHECKOUT, "h100")


FINAL_NORM = """
from megatron_epp.mcore.certify.backend import hide_transformer_engine
{hide}
from megatron.core.transformer import transformer_block
print(transformer_block.LayerNormImpl.__name__)
"""


def test_local_layers_in_float64_have_no_norm_of_it(tmp_path) -> None:
    """Where it is installed Megatron's local models end in one, which knows no float64 on a GPU."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    package.joinpath("__init__.py").write_text("raise RuntimeError('it was imported')\n")
    environment = without_engine()
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    seen, hidden = (
        python("-c", FINAL_NORM.format(hide=hide), only=environment)
        for hide in ("", "hide_transformer_engine()")
    )
    assert seen.returncode != 0 and "it was imported" in seen.stderr
    assert hidden.returncode == 0, hidden.stderr
    assert hidden.stdout.split()[-1] == "WrappedTorchNorm"


SERVER = """
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.protocol import Role
from megatron_epp.certify.trial import LLAMA, Trial
from megatron_epp.mcore.certify import backend, rank
from megatron_epp.mcore.patching import cpu_host, cuda_host, patch_points
trial = Trial(Degrees(1, 2, 1), (tuple(LLAMA.split()),), device="cuda")
with (ExitStack() as held, patch.object(cuda_host, "prepare"), patch.object(rank, "Rank"),
      patch.object(backend, "_require_gpu"), patch.object(cpu_host, "install_cpu_host")):
    backend.make_server(Role(0, Path("."), trial), held)
print(patch_points.is_installed(patch_points.SEQUENCE_PARALLEL_NORM))
"""


def test_local_layers_on_gpus_have_a_norm_for_sequence_parallelism() -> None:
    """Megatron refuses torch's there; a certificate over an H100 with two-way TP met it."""
    seen = python("-c", SERVER)
    assert seen.returncode == 0, seen.stderr
    assert seen.stdout.split()[-1] == "True"


ROTARY = """
import torch
from megatron_epp.mcore.patching import cpu_host
cpu_host.install_cpu_host()
from megatron_epp.mcore.certify.backend import rotate_in_double
rotate_in_double()
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
torch.cuda.current_device = lambda: "meta"  # what is not made on the host has no numbers
for kind in (RotaryEmbedding, YarnRotaryEmbedding):
    made = kind(kv_channels=16, rotary_percent=1.0, use_cpu_initialization=False)
    print(kind.__name__, *(f"{name}={value.dtype}" for name, value in sorted(vars(made).items())
                           if name.startswith("inv_freq") and value.device.type == "cpu"))
"""


def test_rotary_frequencies_of_gpus_are_the_hosts_in_float64() -> None:
    environment = without_engine()
    seen = python("-c", ROTARY, only=environment | {"PYTHONPATH": str(ROOT)})
    assert seen.returncode == 0, seen.stderr
    plain, yarn = (line for line in seen.stdout.splitlines() if "Embedding" in line)
    assert plain == "RotaryEmbedding inv_freq=torch.float64"
    assert yarn.startswith("YarnRotaryEmbedding inv_freq=torch.float64")


def test_its_layers_in_float64_are_refused_on_gpus() -> None:
    trial = Trial(Degrees(1, 1, 1), models(DENSE), device="cuda")
    with pytest.raises(ValueError, match="do not compute in float64; give --dtype bf16"):
        choose_engine(trial)


def test_adapters_around_its_linears_are_refused() -> None:
    with pytest.raises(ValueError, match="--lora-rank: adapters are put around Megatron's local"):
        certify(MEGATRON, Trial(Degrees(1, 1, 1), models(DENSE), batches=1, lora_rank=4))


# ------------------------------------------------------------------ faults

OF_WINDOWS = ("see one less behind a border", "forget the sinks of slices")
# Layers with windows or sinks have one mask.
OF_TWO_MASKS = "mask of whole documents"
FRAME = Frame(61, (2,), replicas=1, modes=modes_drawn(EXECUTABLE))


def shows(way: str, drawn: RandomBatch) -> bool:
    """Whether the way shows in the batch: a document is cut, behind a window, a backward split,
    and of another chunk attention is neither recomputed nor is its backward split."""
    (plan,) = drawn.step.plans
    later = slices_of(plan).later
    if way == "see one less behind a border":
        spans = [span for chunk in plan.chunks for span in chunk.spans]
        return any(span.start >= WINDOW for span in spans)
    if way == "lose what was set aside":
        return plan.splits_backward
    if way == "mistake what was saved":
        return any("k" in letters for letters in plan.recompute[0])
    if way == "overwrite gradients":
        return len(plan.chunks) > 2 and not plan.splits_backward
    return "nothing" in way or max(later) >= 0


@pytest.fixture(scope="module")
def seed() -> int:
    return first_seed(TABLE, FRAME, shows)


@pytest.fixture(scope="module")
def judged(seed) -> Mapping[str, BatchVerdict]:
    return inject_alone(TABLE, GPT_OSS + ENGINE, seed)


@pytest.mark.parametrize("way", names(TABLE))
def test_whatever_is_broken_shows(judged, way) -> None:
    require_shown(judged[way], "nothing" if way == OF_TWO_MASKS else way)


def test_whatever_is_broken_shows_in_bf16(seed) -> None:
    """But what is off by less than that format's own digits, or of what this model has not."""
    judged = inject_alone(TABLE, DENSE + ENGINE, seed, BF16)
    for way, batch in judged.items():
        assert not batch.problems and batch.bound == OWN_BOUND, way
        if "nothing" in way or way in ("mistake what was saved", *OF_WINDOWS):
            assert batch.passed, batch
        else:
            assert batch.gradient_error > 2 * OWN_BOUND, batch
