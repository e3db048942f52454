"""Certify by training's table: what --epp refuses ends it, what --epp ignores it lists."""

import re
from pathlib import Path

import pytest

from megatron_epp.certify.trial import read
from megatron_epp.mcore.certify.model_flags import parsed, scaled
from megatron_epp.mcore.flags import replaced
from tests.mcore.runs import flags
from tests.mcore.test_refusals import OF_MAIN, STARTS, row_of
from tests.programs import python


def read_by_certify(how: dict[str, object]) -> str | None:
    """What certify says of flags that --epp ignores. ValueError: it refuses them."""
    changes = {"epp": True, "pipeline_model_parallel_size": 1, **how}
    ranks, _ = changes.pop("ranks", 1), changes.pop("hybrid", False)
    words = " ".join(map(str, flags(Path("corpus"), **changes))).split()
    one = read(words).degrees.ranks
    trial = read([*words, "--dp", str(ranks // one)])
    raw = parsed(trial.models[0], trial.degrees.pp)
    scaled(raw, trial.degrees, overlap=False)
    return replaced.warning(raw)


def test_flags_without_a_row_are_certified() -> None:
    assert read_by_certify({}) is None


@pytest.mark.everything
@pytest.mark.parametrize("words", STARTS)
def test_each_row_of_the_table(words: str) -> None:
    row = row_of(words)
    try:
        ignored = read_by_certify(STARTS[words])
    except ValueError as error:
        line = str(error)
        if line.startswith("unrecognized arguments: "):
            assert line.split()[2].rstrip(";") in OF_MAIN
        elif words == "other attention":  # Megatron 0.19 has no other; a framework's may
            assert "invalid choice: 'another'" in line
        else:
            assert row.typed and line == f"--epp does not run {row.what}: {row.instead}"
    else:
        assert not row.typed and ignored is not None
        assert any(flag in ignored for flag in re.findall(r"--[a-z-]+[a-z]", row.what)), ignored


def test_what_training_refuses_ends_with_status_2() -> None:
    words = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --cuda-graph-impl local"
    done = python(*f"-m megatron_epp certify --pp 1 --attention-dropout 0.1 {words}".split())
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "megatron_epp: error: --epp does not run dropout"
    )
