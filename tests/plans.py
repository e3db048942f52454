"""Plans for tests: one known by heart, and arbitrary ones."""

from collections import deque
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
from megatron_epp.ir.random_plan import arbitrary_plan

# The plan of the README and of design.md: a cut document, a hybrid chunk, a whole document.
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

LETTERS = "kfcmnabo"


@st.composite
def plans(
    draw: st.DrawFn,
    most_stages: int = 4,
    split_backward: float | None = None,
    vocabulary_parallel: bool = False,
) -> Plan:
    """Plans that run: any cut, packing, order and recompute."""
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=7))
    fewest = 2 if vocabulary_parallel else 1
    layers = draw(st.lists(st.integers(0, 4), min_size=fewest, max_size=most_stages))
    seed = draw(st.integers(0, 2**32))
    share = draw(st.sampled_from((0.0, 0.5, 1.0))) if split_backward is None else split_backward
    return arbitrary_plan(
        lengths,
        layers,
        Random(seed),
        split_backward=share,
        letters=LETTERS,
        vocabulary_parallel=vocabulary_parallel,
    )


def any_plans() -> st.SearchStrategy[Plan]:
    """With vocabulary parallelism and without."""
    return st.one_of(plans(), plans(vocabulary_parallel=True))


def evaluation(plan: Plan) -> Plan:
    """The forwards of ``plan``, and its H."""
    kept = (Kind.FORWARD, Kind.HEAD)
    orders = tuple(tuple(op for op in order if op.kind in kept) for order in plan.orders)
    return Plan(plan.documents, plan.layers, plan.chunks, plan.recompute, orders)


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
