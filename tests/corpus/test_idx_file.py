"""An index is read whole or refused: no bit of it can be wrong and stay unseen where it counts."""

import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.corpus import idx_file
from megatron_epp.corpus.idx_file import examine, read_index
from megatron_epp.corpus.lengths import open_corpus


def write_pair(
    prefix: Path, lengths: list[int], *, code: int = 4, boundaries=None, modes: bool = False
) -> Path:
    """A .idx and its .bin, written by hand from the format's description."""
    itemsize = np.dtype(idx_file.DTYPES[code]).itemsize
    stops = np.cumsum(lengths, dtype=np.int64) * itemsize
    boundaries = np.arange(len(lengths) + 1) if boundaries is None else np.array(boundaries)
    data = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(lengths), len(boundaries))
    data += np.array(lengths, np.int32).tobytes()
    data += np.concatenate([[0], stops[:-1]]).astype(np.int64).tobytes()
    data += boundaries.astype(np.int64).tobytes() + (bytes(len(lengths)) if modes else b"")
    prefix.with_suffix(".idx").write_bytes(data)
    prefix.with_suffix(".bin").write_bytes(bytes(int(stops[-1])))
    return prefix.with_suffix(".idx")


@pytest.mark.parametrize("modes", [False, True])
def test_an_index_counts_inputs_and_skips_the_too_short(tmp_path: Path, modes: bool) -> None:
    path = write_pair(tmp_path / "corpus", [5, 1, 2, 0, 100], modes=modes)
    corpus = open_corpus(str(path))
    assert corpus.in_order() == (4, 1, 99)
    assert (corpus.counts.sequences, corpus.counts.skipped) == (5, 2)
    path.with_suffix(".bin").unlink()  # to plan, lengths are enough
    assert open_corpus(str(path)).in_order() == (4, 1, 99)


def test_megatrons_own_index_is_read(tmp_path: Path) -> None:
    """As its builder writes it, one sequence a document, and one document without any."""
    datasets = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    import torch

    builder = datasets.IndexedDatasetBuilder(str(tmp_path / "corpus.bin"), dtype=np.uint16)
    for length in (7, 300, 1, 42):
        builder.add_document(torch.zeros(length, dtype=torch.int64), [length])
    builder.end_document()
    builder.finalize(str(tmp_path / "corpus.idx"))
    files = examine(str(tmp_path / "corpus"))
    assert files.lengths.tolist() == [7, 300, 1, 42]
    assert (files.sequences, files.documents, files.tokens) == (4, 5, 350)
    assert files.dtype is np.uint16 and not files.is_split_into_sentences
    assert open_corpus(str(tmp_path / "corpus.idx")).in_order() == (6, 299, 41)


def test_sentences_are_seen(tmp_path: Path) -> None:
    path = write_pair(tmp_path / "corpus", [5, 6, 7], boundaries=[0, 2, 3])
    assert read_index(path).is_split_into_sentences


@pytest.mark.parametrize("boundaries", [None, [0, 2, 3, 4]])
@pytest.mark.parametrize("block", [1, 2, 1 << 20])
def test_no_flipped_bit_changes_what_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boundaries: list[int] | None, block: int
) -> None:
    """Every bit of the index: refused, or (a document's start moved) without any effect."""
    monkeypatch.setattr(idx_file, "BLOCK_ENTRIES", block)
    path = write_pair(tmp_path / "corpus", [17, 256, 3, 9], boundaries=boundaries)
    sound = path.read_bytes()
    accepted = []
    for bit in range(8 * len(sound)):
        flipped = bytearray(sound)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            files = examine(str(tmp_path / "corpus"))
        except ValueError as error:
            assert str(error).startswith(str(tmp_path)) and "\n" not in str(error)
            continue
        accepted.append(bit // 8)
        assert files.lengths.tolist() == [17, 256, 3, 9]
    inner = range(34 + 4 * 12 + 8, len(sound) - 8)  # the documents' starts, but the first and last
    assert set(accepted) <= set(inner)
    path.write_bytes(sound)
    assert examine(str(tmp_path / "corpus")).tokens == 285


@st.composite
def mutated(draw: st.DrawFn, sound: bytes) -> bytes:
    """``sound`` with a piece cut out, doubled or replaced, or with one number of it replaced."""
    start = draw(st.integers(0, len(sound)))
    stop = draw(st.integers(start, min(len(sound), start + 24)))
    numbers = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-2, 600)
    piece = st.one_of(
        st.just(b""),
        st.just(sound[start:stop] * 2),
        st.binary(max_size=24),
        numbers.map(lambda number: struct.pack("<q", number)),
        st.integers(-2, 600).map(lambda number: struct.pack("<i", number)),
    )
    return sound[:start] + draw(piece) + sound[stop:]


@given(st.data())
def test_a_mutated_index_is_refused_in_one_line_or_has_the_same_lengths(data) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_pair(Path(folder, "corpus"), [17, 256, 3, 9])
        path.write_bytes(data.draw(mutated(path.read_bytes())))
        try:
            files = examine(str(path.with_suffix("")))
        except ValueError as error:
            assert str(error).startswith(folder) and "\n" not in str(error)
        else:
            assert files.lengths.tolist() == [17, 256, 3, 9]


def rewritten(path: Path, offset: int, form: str, value: int) -> None:
    raw = bytearray(path.read_bytes())
    struct.pack_into(form, raw, offset, value)
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("offset", "form", "value", "line"),
    [
        (34 + 4, "<i", 273, "sequence 2 starts at byte 292 of the tokens; .* end at byte 1160"),
        (34 + 4, "<i", -6, "sequence 1 has -6 tokens"),
        (34 + 12 + 8, "<q", 72, "sequence 1 starts at byte 72 .* end at byte 68; prepare or copy"),
        (34 + 12 + 16, "<q", 1 << 62, "sequence 2 starts at byte 4611686018427387904"),
        (34 + 36, "<q", 1, "its documents start at sequence 1, not 0"),
        (34 + 36 + 16, "<q", 0, "document 1 has -1 sequences"),
        (34 + 36 + 24, "<q", 2, "its documents end at sequence 2 of 3"),
    ],
)
def test_every_damage_has_its_line(
    tmp_path: Path, offset: int, form: str, value: int, line: str
) -> None:
    path = write_pair(tmp_path / "corpus", [17, 56, 3])
    rewritten(path, offset, form, value)
    with pytest.raises(ValueError, match=rf"corpus\.idx: damaged: {line}"):
        open_corpus(str(path))


def test_the_last_length_is_held_against_the_tokens(tmp_path: Path) -> None:
    path = write_pair(tmp_path / "corpus", [17, 56, 3])
    rewritten(path, 34 + 8, "<i", 4)
    with pytest.raises(ValueError, match=r"corpus\.bin: truncated: 304 bytes, corpus.idx descr"):
        open_corpus(str(path))
    rewritten(path, 34 + 8, "<i", 2)
    with pytest.raises(ValueError, match=r"corpus\.bin: not of this index: 304 bytes, .* 300"):
        examine(str(tmp_path / "corpus"))


def test_a_cut_grown_or_foreign_index_is_refused(tmp_path: Path) -> None:
    path = write_pair(tmp_path / "corpus", [5, 6, 7])
    whole = path.read_bytes()
    for data, line in (
        (whole[:-1], "truncated: 101 bytes, its header promises 102 for 3 sequences"),
        (whole[:20], "truncated: 20 bytes, its header alone takes 34"),
        (b"", ""),
        (b"text", ""),
        (whole + b"0000", ""),
        (b"X" + whole[1:], "not a Megatron index"),
        (whole[:9] + b"\2" + whole[10:], "version 2; expected 1"),
        (whole[:17] + b"\6" + whole[18:], "token type 6 is not an integer"),
        (whole[:18] + b"\0" + whole[19:], "no document; expected at least one"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"corpus\.idx.*{line}"):
            read_index(path)


def test_an_index_is_checked_block_by_block(tmp_path: Path, monkeypatch) -> None:
    """Memory stays small beside the file: a million sequences are 20 MB of index."""
    import tracemalloc

    path = write_pair(tmp_path / "corpus", [3] * 1_000_000, code=1)
    path.with_suffix(".bin").unlink()
    monkeypatch.setattr(idx_file, "BLOCK_ENTRIES", 1 << 12)
    tracemalloc.start()
    try:
        assert read_index(path).tokens == 3_000_000
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
