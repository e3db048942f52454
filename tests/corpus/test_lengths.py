"""Batches come from lists, indices and distributions, and are those that training draws."""

import gzip
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from megatron_epp.corpus.epochs import epoch_order
from megatron_epp.corpus.lengths import named_lengths, open_corpus

KIB = 1024


def test_a_list_of_lengths(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("9000\n\n1500  # a comment\r\n900\n")
    assert open_corpus(str(path)).in_order() == (9000, 1500, 900)
    zipped = tmp_path / "lengths.txt.gz"
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    assert open_corpus(str(zipped)).in_order() == (9000, 1500, 900)


def test_groups_with_prefixes(tmp_path):
    path = tmp_path / "groups.txt"
    path.write_text("3000 + (1200, 800+(900,700))  # two levels\n50\n10+(5)\n")
    corpus = open_corpus(str(path), 4700)
    assert corpus.in_order() == (4200, 4700, 4500, 50, 15)
    forest = corpus.documents(0, None)
    forest.require(corpus.in_order())
    assert [(node.tokens, node.parent) for node in forest.nodes] == [
        (3000, -1), (1200, 0), (800, 0), (900, 2), (700, 2), (50, -1), (10, -1), (5, 6),
    ]  # fmt: skip
    assert forest.last == (1, 3, 4, 5, 7)
    # A replica's part: the only answer to a question is one node with it.
    assert [node.tokens for node in forest.of((2, 0)).nodes] == [3000, 1200, 1500]
    assert [node.tokens for node in forest.of((4, 1)).nodes] == [4700, 15]
    drawn = [corpus.documents(number, 2) for number in range(6)]
    for batch in drawn:  # lines stay whole
        batch.require(batch.lengths)
        assert "".join(map(str, batch.lengths)).count("420047004500") == batch.lengths.count(4700)
        assert 2 <= len(batch.lengths) <= 4
    assert drawn == [corpus.documents(number, 2) for number in range(6)]
    assert len({batch.lengths for batch in drawn}) > 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        *((line, "is not a document length; expected") for line in (
            "9+(3,-4)", "-9+(3,4)", "9+(3,4x)", "9+(3,4", "9+(3,4))", "9+()", "9+(3)4", "9+(,3)",
            "+(3,4)", "9+3", "9+(3)+(4)", "9+(0)", "2147483647+(1)", "(3,4)+9",
        )),
        ("3000+(1200,1801)", "4801 tokens with its prefixes; expected at most the --context 4800"),
        ("1+(" * 1500 + "1" + ")" * 1500, "prefixes continue others 1125750 times; expected at mo"),
    ],
)  # fmt: skip
def test_bad_groups_are_named_with_their_line(tmp_path, line, said):
    path = tmp_path / "groups.txt"
    path.write_text(f"16+(7,9)\n{line}\n")
    with pytest.raises(ValueError, match=rf"groups.txt, line 2: .*{said}") as caught:
        open_corpus(str(path), 4800)
    assert "\n" not in str(caught.value)


NO_LENGTH = ["0", "-5", "1.5", "abc", "1e9", "2147483648", "+3", "nan"]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        *(
            (f"12\n{text}\n".encode(), r"line 2: .*expected a positive whole number")
            for text in (*NO_LENGTH, "9" * 16, "9" * 5000, "3 4")
        ),
        (b"4000\n900\nprefix 1: 0[0:4000]\n", r"line 3: .*or a group with a prefix, as in 3000\+"),
        (b"", "holds no length"),
        (b"\n\n# nothing\n", "holds no length"),
        (b"\x93\xff\x00garbage", "cannot be read as a list of lengths"),
        (b"10\n", "were dropped; use a larger --context"),
    ],
)
def test_bad_lists_of_lengths(tmp_path, data, told):
    for name in ("x.txt", "x.gz") if b"garbage" in data else ("x.txt",):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=told) as error:
            open_corpus(str(tmp_path / name), context=4, overlong="drop")
        assert "\n" not in str(error.value)


def test_an_epoch_holds_every_document_once(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, range(1, 11))))
    corpus = open_corpus(str(path))
    epochs = [n for i in range(5) for n in corpus.batch(i, 4)]
    assert sorted(epochs[:10]) == sorted(epochs[10:]) == list(range(1, 11))
    assert epochs[:10] != epochs[10:]
    assert corpus.batch(3, 4) == corpus.batch(3, 4) != corpus.batch(3, 4, seed=1)


def test_epoch_order_is_frozen():
    assert epoch_order(8, 1234, 0).tolist() == [4, 5, 3, 1, 2, 0, 6, 7]


# mean, median, p90, p99, p99.9 and shares of documents and of tokens per bin, in percent:
# statistics of the published lists (systems that published them: see distributions.json).
EDGES = [KIB << n for n in range(8)]
PUBLISHED = {
    "wikipedia": (
        (1014, 347, 2112, 10919, 37353),
        (78.8, 10.9, 6.0, 2.8, 1.12, 0.35, 0.10, 0.023, 0.005),
        (24.9, 15.4, 16.7, 15.5, 12.3, 7.6, 4.5, 2.0, 1.1),
    ),
    "wlb": (
        (3962, 3227, 5784, 26058, 119794),
        (16.0, 15.8, 32.0, 33.9, 1.04, 0.45, 0.36, 0.53, 0),
        (2.1, 6.1, 24.8, 44.6, 2.9, 2.6, 4.2, 12.8, 0),
    ),
    "prolong": (
        (3052, 1914, 6051, 16270, 47398),
        (14.9, 38.4, 27.0, 14.4, 4.27, 0.78, 0.15, 0.04, 0.02),
        (4.2, 18.6, 25.4, 26.5, 15.1, 5.4, 2.1, 1.2, 1.7),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_named_distribution_matches_what_was_published(name):
    figures, documents, tokens = PUBLISHED[name]
    source, lengths = named_lengths(name)
    assert "arXiv" in source or "Apache" in source
    mean, *quantiles = figures
    assert lengths.mean() == pytest.approx(mean, rel=0.01)
    assert np.quantile(lengths, [0.5, 0.9, 0.99, 0.999]) == pytest.approx(quantiles, rel=0.025)
    bins = np.digitize(lengths, EDGES)
    for index in range(9):
        here = bins == index
        # Half a percent of all documents or tokens, or 15% of a thin bin: the printed digits.
        assert 100 * here.mean() == pytest.approx(documents[index], rel=0.25, abs=0.3)
        share = 100 * lengths[here].sum() / lengths.sum()
        assert share == pytest.approx(tokens[index], rel=0.1, abs=0.6)


@pytest.mark.parametrize(
    ("name", "millions", "squares"),
    [("wikipedia", 0.52, 45), ("wlb", 2.01, 75), ("prolong", 1.55, 32)],
)
def test_batches_of_a_named_distribution(name, millions, squares):
    """Tokens of a batch of 512 at context 96K, and the share of the work in documents >= 32K."""
    corpus = open_corpus(name, context=96 * KIB)
    assert corpus.counts.truncated > 0 and max(corpus.inputs) == 96 * KIB
    assert corpus.inputs.mean() * 512 / 1e6 == pytest.approx(millions, rel=0.02)
    work = corpus.inputs.astype(float) ** 2
    assert 100 * work[corpus.inputs >= 32 * KIB].sum() / work.sum() == pytest.approx(squares, abs=2)
    drawn = [sum(corpus.batch(i, 512)) for i in range(100)]
    assert np.mean(drawn) / 1e6 == pytest.approx(millions, rel=0.05)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("wikpedia", "did you mean wikipedia?"),
        ("lenghts.txt", "did you mean lengths.txt?"),
        ("no/such/file.txt", "no such file or distribution"),
        (".", "is a folder"),
        ("/dev/null", "is not a regular file"),
    ],
)
def test_an_unknown_name_shows_what_is_near(tmp_path, monkeypatch, text, hint):
    (tmp_path / "lengths.txt").write_text("5\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"[Ee]xpected") as error:
        open_corpus(text)
    assert hint in str(error.value) and "\n" not in str(error.value)


def test_a_batch_of_many_epochs_is_drawn_epoch_by_epoch(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("\ufeff5\n6\n7\n", encoding="utf-8")  # with an editor's mark
    corpus = open_corpus(str(path))
    many = corpus.batch(1, 5000)
    assert many == tuple(length for i in range(1000, 2000) for length in corpus.batch(i, 5))
    assert all(sorted(many[at : at + 3]) == [5, 6, 7] for at in range(1, 4998, 3))


@pytest.mark.parametrize("name", ["bomb.txt", "bomb.txt.gz"])
def test_a_text_that_unpacks_to_too_much_is_refused(tmp_path, name):
    """50 MB of newlines: 50 KB as .gz."""
    path = tmp_path / name
    with (gzip.open if name.endswith("gz") else open)(path, "wb") as file:
        for _ in range(50):
            file.write(b"\n" * 1_000_000)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"bomb.*holds more than 32 MiB of text; .* \.idx"):
        open_corpus(str(path))
    assert tracemalloc.get_traced_memory()[1] < 160 << 20
    tracemalloc.stop()


def test_splitting_into_too_many_is_refused(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("2147483647\n" * 50)
    with pytest.raises(ValueError, match=r"context of 1 makes 1.07e\+11 doc.* larger --con"):
        open_corpus(str(path), context=1, overlong="split")
    assert len(open_corpus(str(path), context=1, overlong="truncate")) == 50


IMPORT = """
import sys
import megatron_epp.corpus.lengths, megatron_epp.corpus.idx_file, megatron_epp.corpus.overlong
loaded = {name.split(".")[0] for name in sys.modules}
print(sorted(loaded & {"numba", "highspy", "torch", "megatron", "scipy"}), "numpy" in loaded)
"""


def test_the_corpus_needs_numpy_alone():
    """Every rank imports it."""
    run = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    assert run.stdout == "[] True\n"
