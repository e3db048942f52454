"""Documents that continue others: their text, what ties them, and what is refused."""

import re
from random import Random

import pytest

from megatron_epp.ir import Chunk, Plan, PlanError, Span, Step, StepPart, check, slices_of
from tests.certify.trees import arbitrary_prefixes, tree_chunks
from tests.refusals import refusal

TREE = """\
plan v1
replica 0 of 1
documents 40 7 9 3
prefix 1: 0[0:40]
prefix 2: 0[0:40]
prefix 3: 1[0:5]
layers 1 1
chunk 0: 0[0:40]
chunk 1: 1[0:5] 3[0:3] 2[0:9]
chunk 2: 1[5:7]
recompute 0: 1k 1f 1k
recompute 1: 1k 1k 1k
stage 0: F0 F1 F2 B2 B1 B0
stage 1: F0 F1 F2 B2 B1 B0
"""


def test_its_text_and_what_it_says() -> None:
    plan = Plan.parse(TREE)
    assert str(plan) == TREE
    check(plan)
    assert plan.prefixes == (None, Span(0, 0, 40), Span(0, 0, 40), Span(1, 0, 5))
    assert [plan.offset(document) for document in range(4)] == [0, 40, 40, 45]
    assert plan.prefix_of(3) == (Span(0, 0, 40), Span(1, 0, 5))
    own = 5 * 6 // 2 + 3 * 4 // 2 + 9 * 10 // 2
    assert plan.pairs(1) == own + 5 * 40 + 3 * 45 + 9 * 40
    slices = slices_of(plan)
    assert slices.earlier == (-1, 0, 1)
    assert slices.children == ((1,), (2,), ())
    first, second = slices.kept
    assert (first.document, first.first, first.readers, first.boundaries) == (0, 0, (1, 2), (40,))
    assert (second.document, second.first, second.readers, second.boundaries) == (
        1,
        1,
        (2, 1),
        (5,),
    )


def test_a_step_says_where_documents_end() -> None:
    alone = Step.parse(TREE)  # document 0 is a prefix of others, and none of the batch
    assert alone.ends == ((1, 2, 3),) and alone.lengths == (47, 49, 48)
    assert str(alone) == "step v1\ndeal 0: 0 1 2\nends 0: 1 2 3\n" + TREE
    with pytest.raises(PlanError, match=r"prefix 3: 1\[0:5\] is a part of document 1 of 7 inputs"):
        alone.part(0).samples_of(0)
    nodes = TREE.replace("1[0:5]", "1[0:7]", 1).replace("chunk 1: 1[0:5]", "chunk 1: 1[0:7]")
    nodes = nodes.replace("chunk 2: 1[5:7]\n", "chunk 2: -\n").replace("of 1\n", "of 2\n")
    other = "plan v1\nreplica 1 of 2\ndocuments 6\nlayers 1 1\nchunk 0: 0[0:6]\n"
    other += "recompute 0: 1k\nrecompute 1: 1k\nstage 0: F0 B0\nstage 1: F0 B0\n"
    # Documents 3 and 0 are equal, 1 is the beginning of 2; replica 1 has two equal documents.
    head = "deal 0: 3 1 2 0\nends 0: 2 1 3 2\n"
    text = f"step v1\n{head}deal 1: 4 5\nends 1: 0 0\n{nodes}{other}"
    step = Step.parse(text)
    assert str(step) == text and Step.parse(str(step)) == step
    assert step.lengths == (49, 47, 50, 49, 6, 6)
    parts = [step.part(replica) for replica in (0, 1)]
    assert parts[0].samples_of(0) == ((3, 1, 2, 0), (1, 2), (3, 0), (2,))
    assert parts[1].samples_of(1) == ((4, 5),) and parts[1].lengths_of(1) == (6, 6)
    assert [StepPart.parse(str(part)) for part in parts] == parts
    assert Step.of_parts(parts) == step


@pytest.mark.parametrize(
    ("line", "other", "said"),
    [
        ("ends 0: 1 2 3", "ends 0: 1 2", "ends 0: 2 numbers; expected one for each of the 3"),
        ("ends 0: 1 2 3", "ends 0: 1 2 4", "ends 0: document 4; the plan has 4"),
        ("ends 0: 1 2 3", "ends 0: 1 3 3", "ends 0: document 2 of the plan is part of no document"),
        ("ends 0: 1 2 3", "ends 1: 1 2 3", "expected 'deal 1: DOCUMENT ...' or 'ends 0: DOCUM"),
        ("ends 0: 1 2 3", "ends 0: 1 2 3\nends 0: 1 2 3", "expected 'deal 1: DOCUMENT ...'"),
        ("ends 0: 1 2 3", "ends 0: -", "expected 'deal 1: DOCUMENT ...' or 'ends 0: DOCUMENT ...'"),
        ("ends 0: 1 2 3\n", "", "replica 0 is dealt 3 documents; its plan is for 4"),
    ],
)
def test_wrong_ends_are_named(line: str, other: str, said: str) -> None:
    for text in (step := Step.parse(TREE), step.part(0)):
        assert said in refusal(PlanError, type(text).parse, str(text).replace(line, other))


def test_a_plan_without_prefixes_reads_as_before() -> None:
    text = "".join(line for line in TREE.splitlines(True) if not line.startswith("prefix"))
    assert Plan.parse(text).prefixes == () and str(Plan.parse(text)) == text
    assert Plan.parse(text).digest != Plan.parse(TREE).digest


@pytest.mark.parametrize(
    "line, other, said",
    [
        ("prefix 1: 0[0:40]", "prefix 1: 1[0:7]", "document 1 continues itself"),
        ("prefix 1: 0[0:40]", "prefix 1: 3[0:3]", "prefix 1: 3[0:3]: document 1 continues itself"),
        ("prefix 1: 0[0:40]", "prefix 1: 0[1:40]", "inputs of document 0 from the first to"),
        ("prefix 1: 0[0:40]", "prefix 1: 0[0:41]", "one of its 40"),
        ("prefix 1: 0[0:40]", "prefix 1: 9[0:40]", "document 9; there are 4"),
        (
            "prefix 1: 0[0:40]",
            "prefix 1: 0[0:39]",
            "has no boundary there; expected the end of one",
        ),
        ("prefix 1: 0[0:40]", "prefix 1 0[0:40]", "expected 'prefix DOCUMENT: SPAN'"),
        ("prefix 1: 0[0:40]", "prefix 9: 0[0:40]", "document 9; there are 4"),
        ("prefix 2: 0[0:40]", "prefix 1: 0[0:40]", "expected a document after 1, of 4"),
        ("1[0:5] 3[0:3] 2[0:9]", "3[0:3] 1[0:5] 2[0:9]", "1[0:5], which comes after it"),
        ("1[0:5] 3[0:3]", "1[0:5] 3[0:3]@1", "3[0:3]@1 is local to a rank"),
    ],
)
def test_what_is_no_tree_is_said_in_a_line(line: str, other: str, said: str) -> None:
    with pytest.raises(PlanError, match=re.escape(said)) as found:
        check(Plan.parse(TREE.replace(line, other)))
    assert "\n" not in str(found.value)


def test_a_chunk_continues_one_chunk() -> None:
    text = (
        "plan v1\ndocuments 4 4 3 3\nprefix 2: 0[0:4]\nprefix 3: 1[0:4]\nlayers 1\n"
        "chunk 0: 0[0:4]\nchunk 1: 1[0:4]\nchunk 2: 2[0:3] 3[0:3]\nstage 0: F0 F1 F2 B2 B1 B0\n"
    )
    with pytest.raises(PlanError, match="chunk 2: continues slices of chunks 0 and 1; expected"):
        check(Plan.parse(text))
    together = text.replace("chunk 0: 0[0:4]\nchunk 1: 1[0:4]\n", "chunk 0: 0[0:4] 1[0:4]\n")
    together = together.replace("chunk 2", "chunk 1").replace("F0 F1 F2 B2 B1 B0", "F0 F1 B1 B0")
    check(Plan.parse(together))


def test_chunks_in_a_circle_are_refused() -> None:
    text = (
        "plan v1\ndocuments 4 4 3 3\nprefix 2: 0[0:4]\nprefix 3: 1[0:4]\nlayers 1\n"
        "chunk 0: 0[0:4] 3[0:3]\nchunk 1: 1[0:4] 2[0:3]\nstage 0: F0 F1 B1 B0\n"
    )
    with pytest.raises(PlanError, match="chunk 0: continues chunk 1, which continues it"):
        check(Plan.parse(text))


def test_random_trees_have_every_form() -> None:
    """Several levels, several branches, a lone one, one of one input; cut, packed, and in one chunk
    with what they continue."""
    seen = set()
    for seed in range(60):
        random = Random(seed)
        lengths = [random.choice((1, random.randint(2, 40))) for _ in range(6)]
        prefixes = arbitrary_prefixes(lengths, random)
        chunks: tuple[Chunk, ...] = tree_chunks(lengths, prefixes, random)
        plan = Plan(tuple(lengths), (1,), chunks, (("k",) * len(chunks),), ((),), prefixes=prefixes)
        slices = slices_of(plan)
        parents = [prefix.document for prefix in prefixes if prefix is not None]
        seen |= {f"{len(plan.prefix_of(d))} levels" for d in range(6)}
        seen |= {"lone" if parents.count(p) == 1 else "several" for p in parents}
        for document, prefix in enumerate(prefixes):
            if prefix is not None:
                seen.add("one input" * (lengths[document] == 1))
                seen.add("within" * (prefix.stop < lengths[prefix.document]))
                seen.add("cut" * any(document == cut for cut in slices.document))
        seen |= {"beside" * (kept.first in kept.readers) for kept in slices.kept}
        seen |= {"branching" * (len(children) > 1) for children in slices.children}
    wanted = {"1 levels", "2 levels", "3 levels", "lone", "several", "one input", "within", "cut"}
    assert wanted | {"beside", "branching"} <= seen
