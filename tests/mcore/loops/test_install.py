"""Which Megatron takes the schedule: what is imported of it at install, and what it must have."""

import ast
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from megatron_epp.mcore.patching.releases import LOOP_RELEASES, release_of
from tests.test_kinds import every_source

# Of Megatron, what releases before 0.19 lack, or loops of others have no use for.
NOT_FOR_LOOPS = (
    "megatron.training",
    "megatron.core.datasets",
    "megatron.core.models.hybrid",
    "megatron.core.ssm.gated_delta_net",
    "megatron.core.transformer.experimental_attention_variant",
    "megatron.core.transformer.moe.moe_logging",
)


def imported_at_once(module: str, sources: dict[str, str]) -> dict[str, str]:
    """By name what an import of ``module`` imports, round all corners, and who does it: neither
    what stands in functions, nor what is there for types alone."""
    found: dict[str, str] = {}
    waiting = [module]
    while waiting:
        importer = waiting.pop()
        for node in ast.parse(sources[importer]).body:
            match node:
                case ast.Import(names=names):
                    reached = [name.name for name in names]
                case ast.ImportFrom(module=str(origin), names=names):
                    reached = [origin, *(f"{origin}.{name.name}" for name in names)]
                case _:
                    continue
            for name in reached:
                if name not in found:
                    found[name] = importer
                    waiting += [name] if name in sources else []
    return found


@pytest.mark.parametrize("module", ["install", "attached"])
def test_nothing_is_imported_that_old_releases_lack(module) -> None:
    found = imported_at_once(f"megatron_epp.mcore.loops.{module}", every_source())
    assert "megatron.core.utils" in found
    assert not {name: by for name, by in found.items() if name.startswith(NOT_FOR_LOOPS)}


def test_kinds_that_an_old_release_lacks_are_refused_by_name(megatron, monkeypatch) -> None:
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from megatron_epp.mcore.kinds import modules

    layer = SimpleNamespace(layer_number=2, self_attention=object.__new__(MLASelfAttention))
    assert [type(kind).__name__ for kind in modules.kinds_of_layer(layer)] == ["MLAModule"]
    monkeypatch.setattr(modules, "VERSION", "0.18.2")
    monkeypatch.setattr(modules, "RELEASE", (0, 18))
    with pytest.raises(ValueError) as refused:
        modules.kinds_of_layer(layer)
    assert str(refused.value) == (
        "layer 2: its self_attention is a MLASelfAttention, a kind that --epp does not run with "
        "megatron-core 0.18.2; expected attention, MLP, experts"
    )


@pytest.mark.parametrize("release", LOOP_RELEASES, ids=str)
def test_older_releases_are_for_loops_alone(megatron, release) -> None:
    """Training and its patch points refuse them; a CPU-only host has its three."""
    from megatron_epp.mcore.patching import patch_points

    (version,) = release.versions
    assert release_of(version) is None
    assert release_of(f"{version}+abc", LOOP_RELEASES) is release
    cpu_host = {one.name for one in patch_points.CPU_HOST_PATCH_POINTS}
    assert set(release.fingerprints) < cpu_host
    with (
        patch.object(megatron.core, "__version__", version),
        pytest.raises(ValueError, match=f"megatron-core {version} is installed; megatron_epp is"),
    ):
        patch_points.check_patch_points()


def test_an_import_round_a_corner_is_found() -> None:
    sources = every_source()
    sources["megatron_epp.runtime.link"] += "\nfrom megatron.training import get_args\n"
    found = imported_at_once("megatron_epp.mcore.loops.install", sources)
    assert found["megatron.training.get_args"] == "megatron_epp.runtime.link"


@pytest.fixture(scope="module")
def megatron() -> Any:
    import megatron.core
    from megatron.core.pipeline_parallel import schedules

    return SimpleNamespace(core=megatron.core, schedules=schedules)


def other(megatron: Any, what: str) -> AbstractContextManager:
    """A Megatron that is another one in ``what``."""
    if what[0].isdigit():
        return patch.object(megatron.core, "__version__", what)
    if what == "another parameter":
        return patch.object(megatron.schedules, "backward_step", lambda output_tensor: None)
    return patch.object(megatron.schedules, what, None)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("0.15.3", "attach: megatron-core 0.15.3 is older than 0.16"),
        (
            "deallocate_output_tensor",
            "megatron.core.pipeline_parallel.schedules.deallocate_output_tensor does not exist",
        ),
        ("another parameter", "schedules.backward_step knows no input_tensor"),
    ],
)
def test_a_megatron_that_cannot_is_refused(megatron, what, reason) -> None:
    import megatron_epp

    own = megatron.schedules.forward_backward_no_pipelining
    with other(megatron, what), pytest.raises(ValueError) as refused:
        megatron_epp.attach(None, None)
    assert str(refused.value).endswith(reason) and "\n" not in str(refused.value)
    assert megatron.schedules.forward_backward_no_pipelining is own


@pytest.mark.parametrize("version", ["0.16.0rc0", "0.20.0+abc", "1.0", "of a branch"])
def test_a_newer_or_unnumbered_one_is_asked_for_its_functions_alone(megatron, version) -> None:
    from megatron_epp.mcore.loops.install import require_megatron

    with patch.object(megatron.core, "__version__", version):
        require_megatron()


def test_the_schedule_is_replaced_once_and_comes_back(megatron) -> None:
    from megatron_epp.mcore.loops.install import Installation, installed
    from megatron_epp.mcore.loops.settings import Settings

    own = megatron.schedules.forward_backward_no_pipelining
    with Installation(Settings()) as made:
        assert installed() is made
        with pytest.raises(ValueError, match="is replaced already"):
            Installation(Settings())
    assert installed() is None and megatron.schedules.forward_backward_no_pipelining is own


def test_nobody_is_warned_while_one_rank_makes_a_plan() -> None:
    """Compiling the planner takes half a minute where the host has other work."""
    from megatron_epp.mcore.loops.pipelines import ModelPipeline
    from megatron_epp.runtime.executor import CurrentOp, OutsidePhase
    from tests.show.plans import one_f_one_b

    current_op, seen = CurrentOp(0), []

    def make():
        seen.append(current_op.what)
        return (one_f_one_b(1, 1),)

    pipeline: Any = object.__new__(ModelPipeline)
    pipeline.programs, pipeline.plans = SimpleNamespace(current_op=current_op, groups=None), {}
    pipeline.planned("a call", make)
    assert isinstance(seen[0], OutsidePhase)
