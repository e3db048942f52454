"""``where`` finds in the corpora what training computes of a recorded chunk."""

import json
from pathlib import Path
from random import Random

import numpy
import pytest

from megatron_epp.corpus.recorded_batch import RecordedBatch
from megatron_epp.ir import Step
from megatron_epp.ir.random_plan import arbitrary_plan
from tests.cli.commands import Commands

pytest.importorskip("megatron_epp.mcore.data.documents")

from megatron_epp.mcore.data.global_batches import Documents, GlobalBatches
from tests.cli.training import documents_of
from tests.mcore.runs import write_documents

SIZES = {"a": 40, "b": 25}
BATCH = 12


def texts_of(name: str) -> list[numpy.ndarray]:
    """Random tokens, so that a sequence is known by its first ones; some are too short or long."""
    random = numpy.random.RandomState(ord(name))
    lengths = [1, 2, *random.randint(3, 90, SIZES[name] - 2)]
    return [random.randint(0, 30_000, length) for length in lengths]


def drawn(prefixes: list[Path], weights: list[float] | None, **how: object) -> Documents:
    return documents_of(prefixes, weights, 32, **{"split": "80,20,0"} | how)


def recorded(batches: GlobalBatches, replicas: int, random: Random, file: str) -> Step:
    """What --epp-record writes of the next batch, with random plans of its replicas."""
    batch = next(batches)
    order = random.sample(range(BATCH), BATCH)
    assignments = tuple(tuple(order[replica::replicas]) for replica in range(replicas))
    plans = tuple(
        arbitrary_plan(
            batch.lengths[list(own)].tolist(), (1, 1), random, replica=replica, replicas=replicas
        )
        for replica, own in enumerate(assignments)
    )
    step = Step(assignments, plans)
    Path(file).write_text(batches.documents.header(int(batch.samples[0])) + str(step))
    return step


@pytest.fixture
def corpora(folder: Path) -> list[Path]:
    return [write_documents(folder / name, texts_of(name), dtype=numpy.uint16) for name in SIZES]


CASES = [
    (1, None, {}),
    (1, None, {"overlong": "split", "split": "30,40,30"}),
    (1, None, {"overlong": "drop"}),
    (2, [0.3, 0.7], {"overlong": "split"}),
    (2, [5.0, 1.0], {"blend_by": "documents"}),
    (2, [5.0, 1.0], {"blend": None, "split": None}),  # --train-data-path
    (1, None, {"masks": True, "overlong": "split"}),
]


@pytest.mark.parametrize(("count", "weights", "how"), CASES)
def test_every_chunk_is_found(
    cli: Commands, corpora: list[Path], count: int, weights: list[float] | None, how: dict
) -> None:
    """Three batches of two replicas, the last in a later epoch: the tokens that training reads, at
    the named place of the corpus."""
    prefixes, random, how = corpora[:count], Random(3), dict(how)
    if how.pop("masks", False):
        masks = [numpy.arange(len(text)) % 7 < 4 for text in texts_of("a")]
        write_documents(Path("a_mask"), masks, dtype=numpy.uint8)
    if "blend" in how:
        how["blend_per_split"] = [([str(one) for one in prefixes], weights), None, None]
    documents = drawn(prefixes, weights, **how)
    texts = {str(prefix): texts_of(prefix.name) for prefix in prefixes}
    seen, overlong = set(), 0
    for consumed in (0, BATCH, 30 * BATCH):
        step = recorded(GlobalBatches(documents, BATCH, consumed), 2, random, "x.step")
        for replica, plan in enumerate(step.plans):
            every = cli.facts(f"where x.step --replica {replica}")
            assert [one["chunk"] for one in every] == [
                number for number, chunk in enumerate(plan.chunks) for _ in chunk.spans
            ]
            for number, chunk in enumerate(plan.chunks):
                one = cli.facts(f"where x.step --replica {replica} --chunk {number}")
                assert one == [each for each in every if each["chunk"] == number]
                assert [each["span"] for each in one] == [*map(str, chunk.spans)]
                for span, found in zip(chunk.spans, one, strict=True):
                    (sample,) = found["samples"]
                    assert sample == consumed + step.assignments[replica][span.document]
                    expected = documents.tokens(sample, span.start, span.stop).tolist()
                    start, stop = map(int, found["tokens"].split(":"))
                    sequence = texts[found["corpus"]][found["sequence"]]
                    assert sequence[start:stop].tolist() == expected
                    assert found["begins_with"] == expected[:12]
                    seen.add(found["corpus"])
                    overlong += start - span.start > 0 or len(sequence) > 33
    assert seen == set(texts) and (overlong or how.get("overlong") == "drop")


def test_documents_that_continue_others(cli: Commands, corpora: list[Path]) -> None:
    """Tokens of a shared prefix are those of the first document that holds it."""
    batches = GlobalBatches(drawn(corpora[:1], None), 3, 24)
    first, second, third = next(batches).lengths.tolist()
    shared = min(first, second) - 1
    Path("x.step").write_text(
        batches.documents.header(24)
        + f"""step v1
deal 0: 2 0 1
ends 0: 3 1 2
plan v1
documents {shared} {first - shared} {second - shared} {third}
prefix 1: 0[0:{shared}]
prefix 2: 0[0:{shared}]
layers 1 1
chunk 0: 0[0:{shared}]
chunk 1: 1[0:{first - shared}] 2[0:{second - shared}] 3[0:{third}]
stage 0: F0 F1 B1 B0
stage 1: F0 F1 B1 B0
"""
    )
    prefix, *others = cli.facts("where x.step")
    assert [prefix["samples"], *(one["samples"] for one in others)] == [[24, 25], [24], [25], [26]]
    starts = [0, shared, shared, 0]
    for found, start in zip([prefix, *others], starts, strict=True):
        sample = found["samples"][0]
        length = int(found["span"].split(":")[1][:-1])
        expected = batches.documents.tokens(sample, start, start + length).tolist()
        assert found["begins_with"] == expected[:12]
        assert found["tokens"] == f"{start}:{start + length}"


def test_a_table_with_words_of_corpora_that_have_moved(
    cli: Commands, corpora: list[Path], folder: Path
) -> None:
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {f"w{number}": number for number in range(29_999)} | {"\x1b[2J": 29_999}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save("tokenizer.json")
    batches = GlobalBatches(drawn(corpora, [1.0, 3.0]), BATCH, 0)
    step = recorded(batches, 2, Random(1), "x.step")
    cli.ran("where x.step")  # and what Megatron has printed until now is read
    for name in SIZES:
        for suffix in (".bin", ".idx"):
            Path(name + suffix).rename(f"moved-{name}{suffix}")
    assert "a.idx: no such file; expected the index of a Megatron" in cli.refused("where x.step")
    line = "where x.step --replica 1 --chunk 0 --tokenizer tokenizer.json --data-path"
    printed = cli.said(f"{line} 1 moved-a 3 moved-b")
    assert printed == cli.said(f"{line} moved-a moved-b")
    head, titles, _, *rows = printed.splitlines()
    assert head == "replica 1 of 2" and titles.split()[-2:] == ["begins", "with"]
    assert len(rows) == len(step.plans[1].chunks[0].spans)
    found = cli.facts("where x.step --replica 1 --chunk 0 --data-path moved-a moved-b")
    for row, one in zip(rows, found, strict=True):
        assert row.endswith(" " + " ".join(f"w{token}" for token in one["begins_with"]))
    # Other files under these names, or in another order.
    assert "25 sequences of" in cli.refused("where x.step --data-path moved-b moved-a")
    told = cli.refused("where x.step --data-path moved-a")
    assert f"--data-path moved-a: expected 0.25 {folder / 'a'} 0.75 {folder / 'b'}" in told
    write_documents(folder / "a", texts_of("a")[::-1], dtype=numpy.uint16)
    told = cli.refused("where x.step --data-path a moved-b")
    assert "x.step: document " in told and " of a; expected the corpus of training" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("x.step --chunk 99", "--chunk 99: replica 0 has chunks 0 to "),
        ("x.step --replica 2", "--replica 2: x.step has replicas 0 to 1"),
        ("x.step --tokenizer none.json", "tokenizer 'none.json': no such file, or no tokenizer."),
        ("x.step --tokenizer small.json", "but the vocabulary has 1 entries"),
        ("old.step", "old.step: does not begin with the lines '# batch: ...' and '# corpus: ...'"),
        ("a.plan", "a.plan: does not begin with the lines"),
        ("none.step", "step none.step: No such file; training with --epp-record DIR writes"),
        ("a.idx", "step a.idx: is not UTF-8 text"),
        ("empty.step", "empty.step: no 'plan v1' line"),
        ("huge.step", "huge.step: does not begin with the lines"),
    ],
)
def test_what_cannot_be_found_is_one_line(
    cli: Commands, corpora: list[Path], words: str, told: str
) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save("small.json")
    batches = GlobalBatches(drawn(corpora, [1.0, 3.0]), BATCH, 0)
    step = recorded(batches, 2, Random(1), "x.step")
    text = Path("x.step").read_text()
    cli.ran("where x.step")  # and what Megatron has printed until now is read
    Path("old.step").write_text(str(step))
    Path("empty.step").write_text("# nothing\n")
    Path("huge.step").write_text(text.replace("weight 0.25", "weight 1e999"))
    assert told in cli.refused(f"where {words}")


def test_a_header_is_read_as_it_is_written() -> None:
    line = "# corpus: sequences 0:9 of 10, 99 tokens, weight 1.0, /a b/#c, weight 1.0"
    head = f"# batch: from sample 0, seed 1, context 8, overlong drop, blend by tokens\n{line}\n"
    batch = RecordedBatch.parse(f"{head}step v1\n{line}\n")
    assert batch is not None and batch.header() == head
    assert [one.prefix for one in batch.corpora] == ["/a b/#c, weight 1.0"]
    assert RecordedBatch.parse(f"step v1\n{head}") is None
    assert json.loads(json.dumps(batch.header())) == head
