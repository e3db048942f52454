"""Placements: which pipeline rank computes which stages of the model.

A placement is given by a name (below, with the ranks of stages 0, 1, ...) or by a file:

even             0 1 2 3             stage i on rank i
interleaved 2    0 1 2 3 0 1 2 3
v                3 2 1 0 0 1 2 3     first and last stage on the last rank
a file           the line ``place`` of a plan, ``place 1 0 0 1``, or a line for each rank:

    rank 0: 1 2                      # stages of rank 0
    rank 1: 0 3
    layers 3 2 2 1                   # layers of every stage; optional
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from megatron_epp.ir.errors import PlanError, quoted
from megatron_epp.ir.recompute import MOST_LAYERS
from megatron_epp.ir.span import NUMBER

EVENLY, INTERLEAVED = "even", "interleaved"
MOST_STAGES = 64  # on a rank
# What a file contains, for error messages
A_PLACEMENT = "lines 'place' or 'rank 0:', and 'layers' if wanted"

_NUMBERS = re.compile(rf"{NUMBER}( {NUMBER})*")
_RANK = re.compile(rf"rank ({NUMBER}):(.*)")
_INTERLEAVED = re.compile(rf"{INTERLEAVED} ({NUMBER})")


@dataclass(frozen=True, slots=True)
class Placement:
    """Assignment of stages to pipeline ranks.

    Attributes:
        place: rank of each stage.
        layers: number of layers of each stage; empty if not specified.
    """

    place: tuple[int, ...]
    layers: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.place)

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return 1 + max(self.place)

    @property
    def shares_ranks(self) -> bool:
        """Whether a rank has several stages."""
        return self.ranks < self.stages

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages on ``rank``, in order."""
        return tuple(stage for stage, where in enumerate(self.place) if where == rank)

    def of_ranks(self, values: Sequence[float]) -> tuple[float, ...]:
        """Return for every rank the sum of ``values`` [stages] over the rank's stages."""
        totals = [0.0] * self.ranks
        for rank, value in zip(self.place, values, strict=True):
            totals[rank] += float(value)
        return tuple(totals)

    @property
    def is_even(self) -> bool:
        """Whether every stage i is on rank i."""
        return self.place == tuple(range(self.stages))

    def __str__(self) -> str:
        return " ".join(map(str, self.place))


def picture(stages: dict[int, list[str]], ranks: int) -> str:
    """Return one line of text with the stages of every rank: ``rank 0: 0 3 | rank 1: 1 2``."""
    every = sorted({*range(ranks), *stages})
    return " | ".join(f"rank {rank}: {' '.join(stages.get(rank, ())) or '-'}" for rank in every)


def named_placement(text: str, ranks: int) -> Placement | None:
    """Return the placement named ``text`` for ``ranks`` pipeline ranks; None if not a name.

    Text that begins with ``place``, such as ``place 1 0 layers 3 2``, is parsed like a file.

    Raises:
        PlanError: the number after ``interleaved``, or the text after ``place``, is invalid.
    """
    if text == EVENLY:
        return Placement(tuple(range(ranks)))
    if text.startswith("place "):
        return placement_of_file(text.replace(" layers ", "\nlayers "), ranks)
    if text == "v":
        return Placement((*reversed(range(ranks)), *range(ranks)))
    match = _INTERLEAVED.fullmatch(text)
    if match is None and text.split(" ")[0] == INTERLEAVED:
        raise PlanError(
            f"{quoted(text)}: expected a number of stages for every rank, as interleaved 2"
        )
    if match is None:
        return None
    times = int(match[1])
    if not 1 <= times <= MOST_STAGES:
        raise PlanError(f"{quoted(text)}: expected from 1 to {MOST_STAGES} stages on every rank")
    return Placement(tuple(range(ranks)) * times)


def read_placement(text: str, ranks: int, read: Callable[[str], str]) -> Placement:
    """Return the placement named ``text``, or the placement in the file at ``text``.

    Args:
        text: name of a placement, or path of a file.
        ranks: pipeline-parallel size.
        read: function that returns the contents of a file.

    Raises:
        PlanError: the placement is invalid.
        OSError: ``read`` could not read the file.
    """
    named = named_placement(text, ranks)
    return placement_of_file(read(text), ranks) if named is None else named


def placement_of_file(text: str, ranks: int) -> Placement:
    """Return the placement in a file's ``text`` for a pipeline of ``ranks``.

    Raises:
        PlanError: a line is invalid, or the lines do not place each stage on one of the ``ranks``
            and at least one stage on each rank.
    """
    place: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    of_ranks: dict[int, list[int]] = {}
    for number, words in _lines(text):
        key, _, rest = words.partition(" ")
        if (match := _RANK.fullmatch(words)) is not None:
            if int(match[1]) in of_ranks:
                raise PlanError(
                    f"line {number} ({quoted(words)}): rank {match[1]} has a line already"
                )
            of_ranks[int(match[1])] = list(_numbers(number, words, match[2].strip()))
        elif key == "place" and not place:
            place = _numbers(number, words, rest)
        elif key == "layers" and not layers:
            layers = _numbers(number, words, rest)
        else:
            raise PlanError(
                f"line {number} ({quoted(words)}): expected 'place' and the rank of every stage, "
                "or 'rank 0:' and its stages, and 'layers' if wanted"
            )
    if bool(place) == bool(of_ranks):
        raise PlanError(
            "expected one line 'place 1 0 0 1' with the rank of every stage, or a line "
            "'rank 0: 1 2' with its stages for every rank"
        )
    placement = Placement(_place_of(of_ranks, ranks) if of_ranks else place, layers)
    _require_every_rank(placement, ranks)
    if layers and (
        len(layers) != placement.stages or not all(0 < n <= MOST_LAYERS for n in layers)
    ):
        raise PlanError(
            f"layers {' '.join(map(str, layers))}: expected at least one for each of "
            f"{placement.stages} stages"
        )
    return placement


def require_last_stage(placement: Placement) -> None:
    """Raise a PlanError unless the last stage, which computes the loss, is on the last rank.

    Megatron reads the loss on the last rank.
    """
    if placement.place[-1] != placement.ranks - 1:
        _fail(
            placement,
            f"the last stage, {placement.stages - 1}, is on rank {placement.place[-1]}; expected "
            f"rank {placement.ranks - 1}, from which Megatron takes the loss",
        )


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, words joined by single blanks) of lines that are not empty."""
    for number, line in enumerate(text.split("\n"), 1):
        if words := " ".join(line.split("#")[0].split()):
            yield number, words


def _numbers(number: int, line: str, text: str) -> tuple[int, ...]:
    if _NUMBERS.fullmatch(text) is None:
        raise PlanError(f"line {number} ({quoted(line)}): expected whole numbers")
    return tuple(map(int, text.split(" ")))


def _place_of(of_ranks: dict[int, list[int]], ranks: int) -> tuple[int, ...]:
    """Return the rank of every stage, after checking that each stage is on exactly one rank."""
    stage_texts = {rank: list(map(str, stages)) for rank, stages in of_ranks.items()}
    every = [stage for stages in of_ranks.values() for stage in stages]
    if not every or max(every) >= MOST_STAGES * ranks or max(of_ranks) >= ranks:
        raise PlanError(
            f"expected ranks below {ranks}, which the pipeline has, and stages below "
            f"{MOST_STAGES * ranks}: {picture(stage_texts, 0)}"
        )
    for stage in every:
        if every.count(stage) > 1:
            raise PlanError(f"stage {stage} is on several ranks: {picture(stage_texts, ranks)}")
    if missing := set(range(1 + max(every))) - set(every):
        raise PlanError(f"stage {min(missing)} is on no rank: {picture(stage_texts, ranks)}")
    where = {stage: rank for rank, stages in of_ranks.items() for stage in stages}
    return tuple(where[stage] for stage in range(len(where)))


def _require_every_rank(placement: Placement, ranks: int) -> None:
    if placement.ranks > ranks:
        _fail(placement, f"there is no rank {placement.ranks - 1}: the pipeline has {ranks}")
    for rank in range(ranks):
        count = placement.place.count(rank)
        if not count:
            _fail(placement, f"rank {rank} has no stage; expected at least one", ranks)
        if count > MOST_STAGES:
            _fail(placement, f"rank {rank} has {count} stages; expected at most {MOST_STAGES}")


def _fail(placement: Placement, what: str, ranks: int = 0) -> NoReturn:
    of_ranks: dict[int, list[str]] = {}
    for stage, rank in enumerate(placement.place):
        of_ranks.setdefault(rank, []).append(str(stage))
    raise PlanError(f"{what}: {picture(of_ranks, ranks)}")
