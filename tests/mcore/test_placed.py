"""Several stages on a rank: what the plain model computes, whatever the placement."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import GPT, LLAMA, Trial, read
from megatron_epp.ir import Op
from megatron_epp.mcore.model.stage import reduce_in_turn
from tests.mcore.certified import certified


def model(flags: str, stages: int, *placement: str) -> tuple[str, ...]:
    words = f"{flags} --num-layers {2 * stages} --epp-placement".split()
    return (*words, *placement)


def test_both_ends_on_one_rank_with_replicas() -> None:
    """A V, whose ends share a rank: of a model with a head of its own, and of one whose embedding
    is tied to it; gradients are reduced in buckets while ops run, where every plan has an order of
    its own."""
    models = model(LLAMA, 4, "v"), model(GPT, 4, "v")
    lines, judged = certified(Trial(Degrees(pp=2, tp=1, dp=2), models, batches=6, overlap=True))
    assert sum("stages on ranks 1 0 0 1" in line for line in lines) == 2
    for kind in ("split", "hybrid", "packed", "halved", "offloaded"):
        assert sum(getattr(batch.coverage, kind) for batch in judged) > 0
    for batch in judged:  # from rank 1 to 0 and on to itself and back: two links each way
        assert batch.messages == 4 * batch.coverage.chunks


def test_words_over_stages_that_lie_anywhere(tmp_path: Path) -> None:
    """Three ranks with one, two and three stages, neither end alone, uneven layers; words over all
    stages, tied to the embedding of the first."""
    file = tmp_path / "placement"
    file.write_text("rank 0: 2\nrank 1: 0 4\nrank 2: 1 3 5\nlayers 1 2 1 1 2 1\n")
    words = f"{GPT} --num-layers 8 --epp-vocab-parallel on --epp-placement {file}".split()
    lines, _ = certified(Trial(Degrees(pp=3, tp=1, dp=1), (tuple(words),), batches=2))
    assert any("stages on ranks 1 2 0 2 1 2" in line for line in lines)


def test_the_command_line_names_placements() -> None:
    trial = read(["--pp", "2", "--placement", "interleaved", "2", "--dp", "2"])
    assert all(words[-2:] == ("--epp-placement", "interleaved 2") for words in trial.models)
    assert all(words[words.index("--num-layers") + 1] == "8" for words in trial.models)
    assert trial.degrees == Degrees(2, 1, 2)


@dataclass
class Stage:
    """Notes behind which other a stage's reductions start."""

    behind: Any = field(default=None)

    def reduce_behind(self, other: Any) -> None:
        self.behind = other


@pytest.mark.parametrize(
    ("ran", "behind"),
    [
        ("F0 F3 B3 B0", {0: None, 3: None}),
        ("F0 F3 I3 B0 W3", {0: 3, 3: None}),  # the last stage's W comes last
        ("F0 F2 F4 I4 I2 W2 B0 W4", {0: 4, 2: 4, 4: None}),
        ("F0 F2 F4 I4 W4 I2 B0 W2", {0: 2, 2: None, 4: None}),
    ],
)
def test_reductions_start_in_the_order_of_stages(ran: str, behind: dict[int, int | None]) -> None:
    """Each letter and stage of chunk 0."""
    stages: dict[int, Any] = {stage: Stage() for stage in behind}
    reduce_in_turn(stages, [(int(op[1:]), Op.parse(f"{op[0]}0")) for op in ran.split()])
    waits = {stage: None if of is None else stages[of] for stage, of in behind.items()}
    assert all(one.behind is waits[stage] for stage, one in stages.items())
