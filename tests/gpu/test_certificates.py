"""Certificates by this device's own kernels: ranks share its GPUs, messages go over NCCL."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import BF16, EXPERTS, GPT, LLAMA, Trial
from megatron_epp.mcore.patching import emulated_engine
from megatron_epp.mcore.patching.cuda_host import SHARE
from tests.certify.trial import CheckedTrial
from tests.engine.test_certificate import ENGINE, EVERY_DEGREE
from tests.mcore.certified import certified, models
from tests.mcore.models import DSA, GATED_DELTA_NET, LITE, MTP, SSM, V3, V3_MOE, WINDOWS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        emulated_engine.is_wanted(), reason="certified with emulated kernels (tests/engine)"
    ),
]


def local(degrees: Degrees, *lines: str, **changes: object) -> CheckedTrial:
    """``lines`` are models of Megatron's own layers, which have the batches in turn."""
    trial = CheckedTrial(degrees, models(*lines), batches=2 * len(lines))
    return replace(trial, **changes)


# In float64 through Megatron's own layers: the gradients of the reference model to 1e-12.
EXACT: Mapping[str, Trial] = {
    "dense": local(Degrees(2, 1, 1), f"{LLAMA} --num-layers 4", f"{GPT} --num-layers 4"),
    "four stages": local(Degrees(4, 1, 1), f"{LLAMA} --num-layers 4 --epp-vocab-parallel on"),
    "placements": Trial(
        Degrees(2, 1, 1),
        tuple(
            (*f"{LLAMA} --num-layers 8 --epp-placement".split(), placement)
            for placement in ("interleaved 2", "v")
        ),
        batches=4,
    ),
    "tensor parallel": local(
        Degrees(2, 2, 1), f"{LLAMA} --num-layers 4 --sequence-parallel", overlap=True
    ),
    "context parallel": local(Degrees(1, 1, 1, cp=2), f"{LLAMA} --num-layers 2"),
    "MLA and MoE": local(Degrees(2, 1, 2), f"{V3} {V3_MOE} --num-layers 4", overlap=True),
    "DSA": local(Degrees(2, 1, 1), f"{V3} {DSA} --num-layers 4"),
    "MTP": local(Degrees(2, 1, 1), f"{LLAMA} {MTP} --num-layers 4"),
    "windows": local(Degrees(2, 1, 1), f"{LLAMA} --num-layers 4 {WINDOWS}"),
    "lockstep": local(
        Degrees(2, 1, 2), f"{LLAMA} --num-layers 4 {EXPERTS} --expert-model-parallel-size 2"
    ),
    "prefixes": local(Degrees(2, 1, 1), f"{LLAMA} --num-layers 4", trees=True),
}


@pytest.mark.parametrize("name", EXACT)
def test_random_plans_over_nccl_compute_what_the_plain_model_computes(name, monkeypatch) -> None:
    monkeypatch.setenv(SHARE, "1")
    certified(replace(EXACT[name], device="cuda"))


# Each once, in bf16; loops are by their own attention over context-parallel ranks on CPUs.
@pytest.mark.parametrize(
    "name", [name for name, one in EVERY_DEGREE.items() if not one.loop or one.dtype == BF16]
)
def test_the_engines_layers_are_within_twice_the_plain_models_error(
    name, monkeypatch, engine
) -> None:
    monkeypatch.setenv(SHARE, "1")
    certified(replace(EVERY_DEGREE[name], device="cuda", dtype=BF16))


KERNELS = {
    "GDN": (GATED_DELTA_NET, Degrees(1, 1, 1), "fla"),
    "Mamba-2": (f"{SSM} --hybrid-layer-pattern M*|M-", Degrees(2, 1, 1), "mamba_ssm"),
    "MLA": (f"{LITE} --num-layers 4", Degrees(2, 1, 1), None),
}


@pytest.mark.parametrize("kind", KERNELS)
def test_layers_with_kernels_of_their_own_are(kind, monkeypatch, engine) -> None:
    line, degrees, package = KERNELS[kind]
    if package is not None:
        pytest.importorskip(package, reason=f"needs a GPU and {package}")
    monkeypatch.setenv(SHARE, "1")
    certified(local(degrees, line + ENGINE, device="cuda", dtype=BF16))
