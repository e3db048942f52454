"""Reader of Megatron's index files, which checks ``PREFIX.idx`` against the size of ``PREFIX.bin``.

Megatron may detect a damaged pair of files late or never: if a bit of a length or pointer is
flipped, it trains on other tokens. This module reports each kind of damage in one line before
Megatron opens the files. Layout, little-endian, as megatron.core.datasets.indexed_dataset writes
it:

    magic[9]  version u64  dtype u8  sequences u64  boundaries u64
    lengths i32[sequences]  pointers i64[sequences]  boundaries i64[boundaries]  (modes i8)

A pointer is the offset, in bytes, at which its sequence starts in the .bin. Pointers are therefore
the running sums of the lengths in bytes. Boundaries are the numbers of the sequences at which
documents start, followed by the number of sequences. A .bin that is truncated during training
cannot be reported: tokens are memory-mapped, and a read past the end of the file kills the process
(SIGBUS, signal 7).
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, type] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
SCAN_BYTES = 256 << 20  # a .bin up to this size is scanned in full: 0.03 s from the page cache
BLOCK_BYTES = 1 << 20
# Entries of the index that are compared at once; temporary arrays stay small.
BLOCK_ENTRIES = 1 << 20

_AGAIN = "prepare or copy it again"


@dataclass(frozen=True, slots=True)
class CorpusFiles:
    """Corpus with a valid index, and the contents of the index.

    Attributes:
        prefix: path without suffix.
        sequences: number of sequences.
        documents: number of documents.
        tokens: number of tokens in all sequences.
        dtype: integer type of a token.
        is_split_into_sentences: whether some document has several sequences.
        lengths: [sequences] int32, number of tokens of each sequence, memory-mapped.
    """

    prefix: str
    sequences: int
    documents: int
    tokens: int
    dtype: type
    is_split_into_sentences: bool
    lengths: np.ndarray = field(compare=False, repr=False)  # [sequences] int32 tokens, mapped


def examine(prefix: str) -> CorpusFiles:
    """Read the index of a corpus, and check it against the size of its ``.bin``.

    Args:
        prefix: path of the corpus without ``.idx`` or ``.bin``.

    Raises:
        ValueError: a file is missing; the ``.idx`` is not an index, is damaged, or has another
            version or token type; there is no document, or all sequences are empty; or the two
            files do not match.
    """
    index, data = Path(prefix + ".idx"), Path(prefix + ".bin")
    if not index.is_file():
        named_file = prefix.endswith((".bin", ".idx")) and Path(prefix).is_file()
        remedy = f"give {prefix[:-4]}, without the suffix" if named_file else "prepare the corpus"
        raise ValueError(
            f"{index}: no such file; expected the index of a Megatron corpus: {remedy}"
        )
    if not data.is_file():
        raise ValueError(f"{data}: no such file; expected the tokens that {index} describes")
    files = read_index(index)
    if files.tokens == 0:
        raise ValueError(f"{index}: none of its {files.sequences} sequences holds a token")
    return files


def read_index(index: Path) -> CorpusFiles:
    """Read and check the ``.idx`` file ``index``, and the size of its ``.bin`` if there is one.

    The time is proportional to the size of the index. At most one block of the index is in memory.

    Raises:
        ValueError: the file is not an index, is damaged, has no document, has another version or
            token type, or describes another ``.bin``.
        OSError: the file cannot be read.
    """
    index_bytes = index.stat().st_size
    with index.open("rb") as file:
        header = file.read(HEADER.size)
    if header[: len(MAGIC)] != MAGIC[: len(header)]:
        magic = header[: len(MAGIC)]
        raise ValueError(f"{index}: not a Megatron index: starts with {magic!r}, not {MAGIC!r}")
    if len(header) < HEADER.size:
        raise ValueError(
            f"{index}: truncated: {index_bytes} bytes, its header alone takes {HEADER.size}"
        )
    _, version, code, sequences, boundaries = HEADER.unpack(header)
    if version != 1:
        raise ValueError(f"{index}: version {version}; expected 1")
    if code not in DTYPES:
        raise ValueError(f"{index}: token type {code} is not an integer; expected {[*DTYPES]}")
    if sequences == 0 or boundaries < 2:
        raise ValueError(f"{index}: no document; expected at least one")
    needed = HEADER.size + sequences * (4 + 8) + boundaries * 8
    # With several modalities: one more byte per sequence
    if index_bytes not in (needed, needed + sequences):
        what = "truncated" if index_bytes < needed else "damaged"
        raise ValueError(
            f"{index}: {what}: {index_bytes} bytes, its header promises {needed} "
            f"for {sequences} sequences; {_AGAIN}"
        )

    itemsize = np.dtype(DTYPES[code]).itemsize
    lengths, pointers, starts = _columns(index, sequences, boundaries)
    data_bytes = _check_pointers(index, lengths, pointers, itemsize)
    most_sequences = _check_boundaries(index, starts, sequences)
    data = index.with_suffix(".bin")
    if data.is_file() and (actual_bytes := data.stat().st_size) != data_bytes:
        what = "truncated" if actual_bytes < data_bytes else "not of this index"
        raise ValueError(
            f"{data}: {what}: {actual_bytes} bytes, {index.name} describes {data_bytes}; {_AGAIN}"
        )
    return CorpusFiles(
        prefix=str(index)[: -len(".idx")],
        sequences=sequences,
        documents=boundaries - 1,
        tokens=data_bytes // itemsize,
        dtype=DTYPES[code],
        is_split_into_sentences=most_sequences > 1,
        lengths=lengths,
    )


def _columns(index: Path, sequences: int, boundaries: int) -> tuple[np.ndarray, ...]:
    """Return (lengths, pointers, boundaries), memory-mapped."""
    raw = np.memmap(index, mode="r")
    at = HEADER.size
    columns = []
    for dtype, count in (("<i4", sequences), ("<i8", sequences), ("<i8", boundaries)):
        columns.append(np.frombuffer(raw, dtype, count, at))
        at += columns[-1].nbytes
    return tuple(columns)


def _check_pointers(index: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int) -> int:
    """Check that sequences are contiguous; return the expected size of the .bin in bytes."""
    end = 0  # bytes before this block
    for first in range(0, len(lengths), BLOCK_ENTRIES):
        here = lengths[first : first + BLOCK_ENTRIES]
        if (short := here < 0).any():
            at = int(short.argmax())
            raise ValueError(
                f"{index}: damaged: sequence {first + at} has {here[at]} tokens; {_AGAIN}"
            )
        stops = np.cumsum(here, dtype=np.int64) * itemsize + end
        expected = stops - here.astype(np.int64) * itemsize
        actual = pointers[first : first + BLOCK_ENTRIES]
        if (wrong := actual != expected).any():
            at = int(wrong.argmax())
            raise ValueError(
                f"{index}: damaged: sequence {first + at} starts at byte {actual[at]} of the "
                f"tokens; the lengths before it end at byte {expected[at]}; {_AGAIN}"
            )
        end = int(stops[-1])
    return end


def _check_boundaries(index: Path, starts: np.ndarray, sequences: int) -> int:
    """Check that documents cover all sequences; return the most sequences in one document."""
    if starts[0] != 0:
        raise ValueError(
            f"{index}: damaged: its documents start at sequence {starts[0]}, not 0; {_AGAIN}"
        )
    if starts[-1] != sequences:
        raise ValueError(
            f"{index}: damaged: its documents end at sequence {starts[-1]} of {sequences}; {_AGAIN}"
        )
    most = 0
    for first in range(0, len(starts) - 1, BLOCK_ENTRIES):
        counts = np.diff(starts[first : first + BLOCK_ENTRIES + 1])
        if counts.min() < 0:
            at = int(counts.argmin())
            raise ValueError(
                f"{index}: damaged: document {first + at} has {counts[at]} sequences; {_AGAIN}"
            )
        most = max(most, int(counts.max()))
    return most


def examine_vocabulary(files: CorpusFiles, vocabulary_size: int) -> None:
    """Check that the token ids of a corpus are below ``vocabulary_size``.

    In a corpus of more than SCAN_BYTES bytes, the check reads only SCAN_BYTES, in evenly spaced
    blocks, so that a job starts quickly. Training checks every document that it reads
    (mcore/data/documents.py).

    Raises:
        ValueError: a token id is outside the vocabulary.
    """
    if vocabulary_size > np.iinfo(files.dtype).max:
        return
    data = Path(files.prefix + ".bin")
    tokens = np.memmap(data, dtype=files.dtype, mode="r", shape=(files.tokens,))
    block = BLOCK_BYTES // tokens.itemsize
    blocks = -(-tokens.size // block)
    looked_at = min(blocks, SCAN_BYTES // BLOCK_BYTES)
    for number in np.linspace(0, blocks - 1, looked_at).astype(int):
        seen = tokens[number * block : (number + 1) * block]
        check_vocabulary(seen, vocabulary_size, str(data))


def check_vocabulary(tokens: np.ndarray, vocabulary_size: int, where: str) -> None:
    """Raise a ValueError if a token id is outside [0, vocabulary_size)."""
    if tokens.size == 0:
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocabulary_size:
        raise ValueError(
            f"{where}: holds token {low if low < 0 else high}, but the vocabulary has "
            f"{vocabulary_size} entries; train with the tokenizer that prepared this corpus"
        )


def token_reader(files: CorpusFiles) -> Callable[[int, int, int], np.ndarray]:
    """Return a function from a sequence, start and stop to its tokens: [stop - start] int64."""
    _, pointers, _ = _columns(Path(files.prefix + ".idx"), files.sequences, files.documents + 1)
    data = np.memmap(files.prefix + ".bin", dtype=files.dtype, mode="r", shape=(files.tokens,))

    def read(sequence: int, start: int, stop: int) -> np.ndarray:
        first = int(pointers[sequence]) // data.itemsize + start
        return data[first : first + stop - start].astype(np.int64)

    return read
