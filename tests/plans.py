"""Plans for tests: one known by heart, and arbitrary ones."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from hypothesis import strategies as st

from megatron_epp.ir import (
    COMPUTE,
    Item,
    Kind,
    Message,
    Op,
    Payload,
    Plan,
    Post,
    Program,
    Table,
    Transfer,
    lower,
)
from megatron_epp.ir.random_plan import arbitrary_plan, by_stage
from tests.certify.trees import arbitrary_tree

# The plan of docs/reference/plan_format.md: a cut document, a hybrid chunk, a whole document.
EXAMPLE = """\
plan v1
replica 0 of 1
documents 9000 1500 900
layers 4 4
chunk 0: 0[0:5000]
chunk 1: 0[5000:9000] 1[0:1500]
chunk 2: 2[0:900]
recompute 0: 3f1k 4k 2c2k
recompute 1: 4k 4k 4k
stage 0: F0 F1 F2 B1 B0 B2
stage 1: F0 F1 B1 B0 F2 B2
predicted seconds 1.234 peak_gib 10.5 9.8 planner epp
"""

# Four stages on two ranks: interleaved 1F1B, and a V, in which rank 1 has the fold.
_FOUR_STAGES = """\
plan v1
replica 0 of 1
documents 6 9
layers 1 1 1 1
place {place}
chunk 0: 0[0:6]
chunk 1: 1[0:9]
recompute 0: 1k 1k
recompute 1: 1k 1f
recompute 2: 1k 1k
recompute 3: 1k 1k
{orders}
"""
INTERLEAVED = _FOUR_STAGES.format(
    place="0 1 0 1",
    orders="rank 0: F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1\n"
    "rank 1: F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1",
)
V_SHAPE = _FOUR_STAGES.format(
    place="0 1 1 0",
    orders="rank 0: F0.0 F0.1 F3.0 B3.0 F3.1 B3.1 B0.0 B0.1\n"
    "rank 1: F1.0 F2.0 F1.1 F2.1 B2.0 B1.0 B2.1 B1.1",
)

MODES = "kfcmnabo"


def random_place(stages: int, random: Random, fewest: int = 1) -> tuple[int, ...]:
    """The rank of every stage: any number of ranks from ``fewest`` on, each with at least one;
    interleaved, in waves that begin on the first rank or on the last (a V), or anyhow."""
    ranks = random.randint(fewest, stages)
    shape = random.choice(("interleaved", "wave", "v", "any"))
    if shape == "any":
        place = [*range(ranks), *(random.randrange(ranks) for _ in range(stages - ranks))]
        random.shuffle(place)
        return tuple(place)
    there = list(range(ranks)) if shape != "v" else list(reversed(range(ranks)))
    back = there if shape == "interleaved" else there[::-1]
    return tuple(((there + back) * stages)[:stages])


@st.composite
def plans(
    draw: st.DrawFn,
    most_stages: int = 4,
    split_backward: float | None = None,
    vocabulary_parallel: bool = False,
    shares_ranks: bool = False,
    trees: bool = False,
) -> Plan:
    """Plans that run: any cut, packing, order and recompute; ``shares_ranks``: with stages that lie
    on any rank; ``trees``: with documents that continue others."""
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=7))
    fewest = 2 if vocabulary_parallel else 1
    layers = draw(st.lists(st.integers(0, 4), min_size=fewest, max_size=most_stages))
    random = Random(draw(st.integers(0, 2**32)))
    share = draw(st.sampled_from((0.0, 0.5, 1.0))) if split_backward is None else split_backward
    return arbitrary_plan(
        lengths,
        layers,
        random,
        split_backward=share,
        modes=MODES,
        vocabulary_parallel=vocabulary_parallel,
        place=random_place(len(layers), random) if shares_ranks else (),
        **(arbitrary_tree(lengths, random) if trees else {}),
    )


def any_plans(places: bool = True) -> st.SearchStrategy[Plan]:
    """With vocabulary parallelism and without, and with documents that continue others; ``places``:
    and with stages on any rank."""
    one_each = (plans(), plans(vocabulary_parallel=True), plans(trees=True))
    shared = [plans(6, vocabulary_parallel=cut, shares_ranks=True) for cut in (False, True)]
    return st.one_of(*one_each, *(shared if places else ()))


def evaluation(plan: Plan) -> Plan:
    """The forwards of ``plan``, and its H."""
    kept = (Kind.FORWARD, Kind.HEAD)
    ran = [[place for place in order if place[1].kind in kept] for order in plan.rank_orders]
    return reordered(plan, ran)


def reordered(plan: Plan, ran: Sequence[Sequence[tuple[int, Op]]]) -> Plan:
    """``plan`` with (stage, op) of every rank in another order."""
    turns = [tuple(stage for stage, _ in order) for order in ran] if plan.shares_ranks else ()
    orders = by_stage(plan, [place for order in ran for place in order])
    return replace(plan, orders=orders, turns=tuple(turns))


def random_table(plan: Plan, seed: int, links: bool = True, whole: bool = False) -> Table:
    """Random seconds (whole numbers if ``whole``, some of them 0) and whole bytes."""
    random = Random(seed)
    stages, chunks, documents = plan.stages, len(plan.chunks), len(plan.documents)

    def seconds(width: int, height: int = stages) -> list[list[float]]:
        if whole:
            return [[float(random.randint(0, 3)) for _ in range(width)] for _ in range(height)]
        return [[random.uniform(0.1, 3.0) for _ in range(width)] for _ in range(height)]

    def held(width: int) -> list[list[float]]:
        return [[float(random.randint(0, 1000)) for _ in range(width)] for _ in range(stages)]

    joins = {payload: max(stages - 1, 0) for payload in Payload} | {Payload.HEAD: stages}
    return Table(
        seconds={kind: seconds(chunks) for kind in COMPUTE},
        recompute_seconds=seconds(chunks),
        comm_seconds={kind: [[0.01] * chunks for _ in range(stages)] for kind in COMPUTE},
        link_seconds={
            payload: seconds(chunks, rows) if links else [[0.0] * chunks for _ in range(rows)]
            for payload, rows in joins.items()
        },
        link_latency_seconds=random.choice((0.0, 0.25)) if links else 0.0,
        held_bytes={
            Item.ACTIVATIONS: held(chunks),
            Item.KV: held(documents),
            Item.KV_GRADIENTS: held(documents),
            Item.WEIGHT_INPUTS: held(chunks),
            Item.HEAD_INPUTS: held(chunks),
        },
        workspace_bytes={kind: held(chunks) for kind in COMPUTE},
        resident_bytes=[float(random.randint(0, 1000)) for _ in range(stages)],
    )


def ops(text: str) -> tuple[Op, ...]:
    return tuple(map(Op.parse, text.split()))


def two_ahead(plan: Plan) -> tuple[Program, ...]:
    """The programs of ``plan`` with two receives posted on every link from the beginning, and the
    next one after each that is taken: an order of issue that can hang."""
    programs = []
    for program in lower(plan):
        coming: dict[tuple[int, int], deque[Message]] = {}
        for op in program:
            if isinstance(op, Post):
                coming.setdefault(op.message.link, deque()).append(op.message)
        made: list = []
        for messages in coming.values():
            made += [Post(messages.popleft()) for _ in range(min(2, len(messages)))]
        for op in program:
            if isinstance(op, Post):
                continue
            made.append(op)
            if isinstance(op, Transfer) and op.kind is Kind.RECEIVE and coming[op.message.link]:
                made.append(Post(coming[op.message.link].popleft()))
        programs.append(tuple(made))
    return tuple(programs)
