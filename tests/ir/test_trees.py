"""Documents that continue others: their text, what ties them, and what is refused."""

import re
from random import Random

import pytest

from megatron_epp.ir import Chunk, Plan, PlanError, Span, check, slices_of
from tests.certify.trees import arbitrary_prefixes, tree_chunks

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
        ("prefix 1: 0[0:40]", "prefix 1: 0[0:39]", "has no border there; expected the end of one"),
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
