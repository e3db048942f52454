"""Examines a Megatron corpus, PREFIX.idx and PREFIX.bin, before Megatron opens it.

Megatron meets a damaged pair with an assertion, a numpy error or, where only the end is missing,
much later. Here each damage has its line. Layout of the index, little-endian, as
megatron.core.datasets.indexed_dataset writes it:

    magic[9]  version u64  dtype u8  sequences u64  boundaries u64
    lengths i32[sequences]  pointers i64[sequences]  boundaries i64[boundaries]  (modes i8)

A pointer is where its sequence starts in the .bin, in bytes; boundaries are the sequences at which
documents start, and the end.
"""

import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, type] = {
    1: numpy.uint8,
    2: numpy.int8,
    3: numpy.int16,
    4: numpy.int32,
    5: numpy.int64,
    8: numpy.uint16,
}
SCAN_BYTES = 256 << 20  # a .bin up to this size is scanned whole: 0.03 s from the page cache
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CorpusFiles:
    """A pair that was found sound: what its header says."""

    prefix: str
    sequences: int
    documents: int
    tokens: int
    dtype: type
    lengths: numpy.ndarray = field(compare=False, repr=False)  # [sequences] int32, mapped

    @property
    def is_split_into_sentences(self) -> bool:
        """Whether a document is several sequences, as sentence-splitting preprocessing makes it."""
        return self.sequences != self.documents


def examine(prefix: str) -> CorpusFiles:
    """Reads header, boundaries and sizes, and no token.

    Raises:
        ValueError: a file is missing, is no index, or is shorter than the index says.
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

    index_bytes = index.stat().st_size
    with index.open("rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise ValueError(
            f"{index}: truncated: {index_bytes} bytes, its header alone takes {HEADER.size}"
        )
    magic, version, code, sequences, boundaries = HEADER.unpack(header)
    if magic != MAGIC:
        raise ValueError(f"{index}: not a Megatron index: starts with {magic!r}, not {MAGIC!r}")
    if version != 1:
        raise ValueError(f"{index}: version {version}; expected 1")
    if code not in DTYPES:
        raise ValueError(f"{index}: token type {code} is not an integer; expected {[*DTYPES]}")
    needed = HEADER.size + sequences * (4 + 8) + boundaries * 8
    if index_bytes < needed:
        raise ValueError(
            f"{index}: truncated: {index_bytes} bytes, its header promises {needed} "
            f"for {sequences} sequences; prepare or copy it again"
        )
    if sequences == 0 or boundaries < 2:
        raise ValueError(f"{index}: no document; expected at least one")

    lengths, pointers, ends = _columns(index, sequences, boundaries)
    if ends[-1] != sequences or lengths.min() < 0:
        raise ValueError(
            f"{index}: damaged: its documents end at sequence {ends[-1]} of {sequences}, "
            f"its shortest sequence has {lengths.min()} tokens; prepare it again"
        )
    itemsize = numpy.dtype(DTYPES[code]).itemsize
    # Megatron writes the pointers as running sums, so the last sequence ends last.
    data_needed = int(pointers[-1]) + int(lengths[-1]) * itemsize
    if data_needed == 0:
        raise ValueError(f"{index}: none of its {sequences} sequences holds a token")
    data_bytes = data.stat().st_size
    if data_bytes < data_needed:
        raise ValueError(
            f"{data}: truncated: {data_bytes} bytes, {index.name} describes {data_needed}; "
            "prepare or copy it again"
        )
    return CorpusFiles(
        prefix=prefix,
        sequences=sequences,
        documents=boundaries - 1,
        tokens=data_needed // itemsize,
        dtype=DTYPES[code],
        lengths=lengths,
    )


def _columns(index: Path, sequences: int, boundaries: int) -> tuple[numpy.ndarray, ...]:
    """(lengths, pointers, boundaries), mapped: only what is looked at is read."""
    raw = numpy.memmap(index, mode="r")
    at = HEADER.size
    columns = []
    for dtype, count in (
        (numpy.int32, sequences),
        (numpy.int64, sequences),
        (numpy.int64, boundaries),
    ):
        columns.append(numpy.frombuffer(raw, dtype, count, at))
        at += columns[-1].nbytes
    return tuple(columns)


def examine_vocabulary(files: CorpusFiles, vocabulary_size: int) -> None:
    """Looks for token ids that have no row in an embedding of ``vocabulary_size`` rows.

    Exact up to SCAN_BYTES of tokens; of a larger corpus as many bytes are looked at, in blocks
    spread evenly, so that the start of a job on terabytes takes no longer. Whatever is read in
    training is checked again, exactly (documents.py).

    Raises:
        ValueError: such a token was found.
    """
    if vocabulary_size > numpy.iinfo(files.dtype).max:
        return
    data = Path(files.prefix + ".bin")
    tokens = numpy.memmap(data, dtype=files.dtype, mode="r", shape=(files.tokens,))
    block = BLOCK_BYTES // tokens.itemsize
    blocks = -(-tokens.size // block)
    looked_at = min(blocks, SCAN_BYTES // BLOCK_BYTES)
    for number in numpy.linspace(0, blocks - 1, looked_at).astype(int):
        seen = tokens[number * block : (number + 1) * block]
        check_vocabulary(seen, vocabulary_size, str(data))


def check_vocabulary(tokens: numpy.ndarray, vocabulary_size: int, where: str) -> None:
    """Refuses token ids outside [0, vocabulary_size)."""
    if tokens.size == 0:
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocabulary_size:
        raise ValueError(
            f"{where}: holds token {low if low < 0 else high}, but the vocabulary has "
            f"{vocabulary_size} entries; train with the tokenizer that prepared this corpus"
        )
