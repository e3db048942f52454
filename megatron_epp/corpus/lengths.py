"""Lengths of documents from a list, a Megatron index, texts, or a named distribution.

Each source becomes a :class:`Corpus` with the number of tokens of every document. The policy for
documents longer than the context has then been applied. Batches are drawn as in training: batch i
contains documents [i x size, (i + 1) x size) of an endless sequence of epochs. Each epoch is a
permutation that (seed, epoch) determines.

    lengths.txt, lengths.txt.gz   tokens of a document, one document per line; or a group of
                                  documents with common prefixes, as in 3000+(1200,800+(900,700))
    corpus.idx                    every sequence of L tokens is a document of L - 1 input tokens;
                                  with corpus_mask.bin/.idx next to it (loss_mask.py), without
                                  the tokens after its last target
    texts.jsonl, chats.parquet    texts or chats, tokenized to count tokens (text_lengths.py)
    wikipedia, prolong, wlb       distributions.json: quantiles of tokens, with their source
"""

import difflib
import gzip
import itertools
import json
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path

import numpy as np

from megatron_epp.corpus.epochs import Epochs, epoch_order
from megatron_epp.corpus.idx_file import CorpusFiles, read_index, token_reader
from megatron_epp.corpus.loss_mask import examine_masks
from megatron_epp.corpus.overlong import Counts, apply_context, require_policy
from megatron_epp.corpus.shared_prefixes import Batch, PrefixForest
from megatron_epp.corpus.text_lengths import SUFFIXES, Progress, text_lengths, text_tokens
from megatron_epp.corpus.token_prefixes import CorpusTokens, SequenceTokens
from megatron_epp.ir.errors import first_line, quoted
from megatron_epp.ir.plan import MOST_CONTINUED

# Number of documents, at evenly spaced quantiles, that represent a named distribution.
NAMED_DOCUMENTS = 200_000
# Default of Megatron's --seed; seeds have 32 bits.
DEFAULT_SEED = 1234

_MOST_EPOCHS = 2**32  # epoch numbers are seeds, too

# Limits of a text file of lengths, unpacked: some millions of documents, read in seconds.
_MOST_TEXT_BYTES = 32 << 20
_MOST_LINES = 5_000_000
# A gzip file has one member or several concatenated ones.
_MOST_GZIP_MEMBERS, _GZIP_MAGIC = 10_000, b"\x1f\x8b\x08"
# Limit of the documents that the policy "split" may create from a list or an index.
_MOST_PIECES = 100_000_000

MOST_LENGTH = 2**31 - 1  # of a document, as in an .idx; pairs of tokens then fit into 64 bits

_LENGTH = re.compile(r"[1-9][0-9]{0,9}")


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Lengths of a corpus's documents in file order, with the policy for overlong ones applied.

    Attributes:
        name: name on the command line.
        source: file, or source of a distribution.
        inputs: [documents] int64, number of input tokens of each document.
        counts: numbers of truncated, dropped, split and other sequences (overlong.py).
        note: how tokens of texts were counted; empty if the source contains lengths.
        groups: documents of every line of a text file, if a line has shared prefixes; otherwise
            empty. Batches consist of complete groups.
        document_tokens: tokens of the documents; None if the source has only lengths, or texts
            without a tokenizer.
    """

    name: str
    source: str
    inputs: np.ndarray
    counts: Counts
    note: str = ""
    groups: tuple[PrefixForest, ...] = ()
    document_tokens: CorpusTokens | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def tokens(self) -> int:
        """Number of input tokens in all documents."""
        return int(self.inputs.sum())

    def in_order(self) -> tuple[int, ...]:
        """Return the lengths of all documents as one batch, in file order."""
        return tuple(self.inputs.tolist())

    def documents(self, index: int, size: int | None, seed: int = DEFAULT_SEED) -> Batch:
        """Return batch ``index`` as :meth:`batch` does, or all documents if ``size`` is None.

        If the corpus has groups, the result is a PrefixForest of as many groups as are needed for
        ``size`` documents. ``seed`` is the seed of the shuffle.

        Raises:
            ValueError: an argument is out of range.
        """
        if self.groups:
            return self._groups_of(index, size or len(self.inputs), seed, size is None)
        return self.in_order() if size is None else self.batch(index, size, seed)

    def sharing(
        self, index: int, size: int | None, seed: int, least: int, depths: int
    ) -> PrefixForest:
        """Return the forest of the documents of batch ``index``, with the prefixes that they share.

        The corpus must have tokens (``document_tokens``).

        Args:
            index: number of the batch.
            size: number of documents in a batch; None: all documents.
            seed: seed of the shuffle.
            least: minimum number of tokens of a shared prefix.
            depths: number of MTP layers.

        Raises:
            ValueError: an argument is out of range, or tokens cannot be read.
        """
        assert self.document_tokens is not None, "the source has no tokens"
        every = np.arange(len(self.inputs))
        chosen = every if size is None else self._drawn(index, size, seed)
        return self.document_tokens.forest(chosen, least, depths)

    def batch(self, index: int, size: int, seed: int = DEFAULT_SEED) -> tuple[int, ...]:
        """Return the lengths of the ``size`` documents of batch ``index``, as training draws it.

        ``seed`` is the seed of the shuffle.

        Raises:
            ValueError: an argument is out of range.
        """
        return tuple(self.inputs[self._drawn(index, size, seed)].tolist())

    def _drawn(self, index: int, size: int, seed: int) -> np.ndarray:
        """Return the document numbers of batch ``index``: [size] int64."""
        if index < 0 or size < 1:
            raise ValueError(f"batch {index} of {size} documents: expected 0 or more, of 1 or more")
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed {seed}: expected a number from 0 to {2**32 - 1}")
        count = len(self.inputs)
        if (index + 1) * size > count * _MOST_EPOCHS:
            raise ValueError(
                f"batch {index} of {size} documents: needs more than {_MOST_EPOCHS} epochs of "
                f"{count}"
            )
        items = np.arange(index * size, (index + 1) * size)
        return Epochs(count, seed).documents(items)

    def _groups_of(self, index: int, size: int, seed: int, in_order: bool) -> PrefixForest:
        if in_order:
            return PrefixForest.joined(self.groups)
        drawn: list[PrefixForest] = []
        documents = number = 0
        for epoch in itertools.count():
            for at in epoch_order(len(self.groups), seed, epoch).tolist():
                drawn.append(self.groups[at])
                documents += len(self.groups[at].last)
                if documents >= size and number == index:
                    return PrefixForest.joined(drawn)
                if documents >= size:
                    drawn, documents, number = [], 0, number + 1
        raise AssertionError("epochs do not end")


def open_corpus(
    text: str,
    context: int = 0,
    overlong: str = "truncate",
    tokenizer: str | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """Return the corpus that ``text`` names: a file if there is one, otherwise a distribution.

    Args:
        text: path of a file, or name of a distribution.
        context: maximum number of input tokens of a document; 0: no limit.
        overlong: policy for longer documents: truncate, drop, or split into documents of their own.
        tokenizer: tokenizer.json or its folder, which counts the tokens of texts and chats; only
            allowed for these. None: four bytes are a token.
        progress: progress bar for counting tokens; see
            :func:`~megatron_epp.corpus.text_lengths.text_lengths`.

    Raises:
        ValueError: an argument is invalid, or the corpus cannot be used; the message names a
            remedy.
        ModuleNotFoundError: pyarrow or tokenizers is needed and not installed.
    """
    require_policy(overlong)
    if context < 0:
        raise ValueError(f"context {context}: expected a positive number of tokens")
    path, masks, note = Path(text), None, ""
    groups: tuple[PrefixForest, ...] = ()
    opened: Callable[[Sequence[int]], SequenceTokens] | None = None
    of_texts = path.suffix in SUFFIXES and path.is_file()
    if tokenizer is not None and not of_texts:
        raise ValueError(
            f"--tokenizer: the lengths of {text} are tokens already; leave it out, or give texts "
            f"({' or '.join(SUFFIXES)})"
        )
    if of_texts:
        source, (note, inputs) = text, text_lengths(path, tokenizer, progress)
        if tokenizer is not None:
            opened = partial(_text_reader, path, tokenizer)
    elif path.is_file() and path.suffix == ".idx":
        source, files = text, read_index(path)
        inputs, masks = index_inputs(path, files), examine_masks(files)
        opened = partial(_index_reader, files)
    elif path.is_file():
        source, (inputs, groups) = text, read_lengths(path, context)
    elif text in distribution_names():
        source, inputs = named_lengths(text)
    else:
        raise ValueError(_no_corpus(text))
    if overlong == "split" and context:
        pieces = float(np.ceil(inputs / context).sum())  # a float: the sum may not fit an integer
        if pieces > _MOST_PIECES:
            raise ValueError(
                f"{text}: --overlong split at a context of {context} makes {pieces:.3g} documents; "
                f"expected at most {_MOST_PIECES}; use a larger --context, or truncate or drop"
            )
    if masks is None:
        index = apply_context(inputs, context, overlong)
    else:
        index = masks.index(context, overlong)
        if not index.counts.documents and not index.counts.dropped:
            raise ValueError(
                f"{masks.prefix}.bin: no target in any of the {len(inputs)} documents, as far as "
                "the context reaches; expected at least one token with a 1"
            )
    if not index.counts.documents:
        raise ValueError(
            f"{text}: all {len(inputs)} documents are longer than the context of {context} tokens "
            "and were dropped; use a larger --context, or --overlong truncate or split"
        )
    tokens = None if opened is None else CorpusTokens(index, opened)
    return Corpus(text, source, index.inputs, index.counts, note, groups, tokens)


def _index_reader(files: CorpusFiles, _: Sequence[int]) -> SequenceTokens:
    return token_reader(files)


def _text_reader(path: Path, tokenizer: str, sequences: Sequence[int]) -> SequenceTokens:
    tokens = text_tokens(path, tokenizer, sequences)
    return lambda sequence, start, stop: tokens[sequence][start:stop]


def index_inputs(path: Path, files: CorpusFiles) -> np.ndarray:
    """Return the number of input tokens of every sequence of an ``.idx``: [sequences] int64.

    A value below 1 means no input tokens. The ``.bin`` does not need to exist.

    Raises:
        ValueError: no sequence has input tokens.
    """
    inputs = files.lengths.astype(np.int64) - 1
    if inputs.max() < 1:
        raise ValueError(
            f"{path}: none of its {len(inputs)} sequences has 2 tokens or more; "
            "expected at least one with something to predict"
        )
    return inputs


def read_lengths(path: Path, context: int = 0) -> tuple[np.ndarray, tuple[PrefixForest, ...]]:
    """Return the documents in a text file, optionally gzipped, with one length or group per line.

    Blank lines and text after ``#`` are skipped.

    Args:
        path: the file.
        context: maximum number of tokens of a document of a group, with its prefixes; 0: no limit.

    Returns:
        [documents] int64 lengths, and the group of every line; () if no line has a prefix.

    Raises:
        ValueError: the file cannot be read, a line is not a length or a group, or a document of a
            group exceeds ``context``.
    """
    try:
        # A limit, because a .gz of one megabyte can hold a thousand times as much.
        with path.open("rb") as file:
            data = file.read(_MOST_TEXT_BYTES + 1)
        if path.suffix == ".gz":
            if (members := data.count(_GZIP_MAGIC)) > _MOST_GZIP_MEMBERS:
                raise OSError(f"{members} gzip files in one")
            with gzip.open(path, "rb") as file:
                data = file.read(_MOST_TEXT_BYTES + 1)
        text = data.decode("utf-8-sig")  # some editors write a byte-order mark
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: cannot be read as a list of lengths ({first_line(error)}); "
            "expected text (or .gz of it) with one positive whole number a line"
        ) from error
    if len(data) > _MOST_TEXT_BYTES:
        raise ValueError(
            f"{path}: holds more than {_MOST_TEXT_BYTES >> 20} MiB of text; expected a list of "
            "lengths; give a part of it, or the corpus's .idx, which has no limit"
        )
    if (lines := text.count("\n")) > _MOST_LINES:
        raise ValueError(
            f"{path}: has {lines} lines; expected at most {_MOST_LINES} of a list of lengths; give "
            "a part of it, or the corpus's .idx, which has no limit"
        )
    lengths: list[int] = []
    groups: list[PrefixForest | int] = []
    for number, line in enumerate(text.split("\n"), 1):
        word = line.split("#")[0].strip()
        if not word:
            continue
        where = f"{path}, line {number}"
        length = int(word) if _LENGTH.fullmatch(word) else 0
        group = PrefixForest.parsed("".join(word.split())) if "+" in word else None
        longest = length if group is None else max(group.lengths)
        if not 1 <= longest <= MOST_LENGTH:
            raise ValueError(
                f"{where}: {quoted(word)} is not a document length; expected a "
                f"positive whole number of tokens, at most {MOST_LENGTH}, on each line, or a "
                "group with a prefix, as in 3000+(1200,800+(900,700))"
            )
        if group is not None and context and longest > context:
            raise ValueError(
                f"{where}: a document of {longest} tokens with its prefixes; expected at most the "
                f"--context {context}"
            )
        if group is not None and group.depths > MOST_CONTINUED:
            raise ValueError(
                f"{where}: prefixes continue others {group.depths} times; expected at most "
                f"{MOST_CONTINUED}, as in a plan"
            )
        lengths += [length] if group is None else group.lengths
        groups.append(length if group is None else group)
    if not lengths:
        raise ValueError(f"{path}: holds no length; expected at least one, one a line")
    inputs = np.array(lengths, np.int64)
    if all(isinstance(group, int) for group in groups):
        return inputs, ()
    apart = PrefixForest.apart
    return inputs, tuple(apart([each]) if isinstance(each, int) else each for each in groups)


def distribution_names() -> tuple[str, ...]:
    """Return the names of the shipped distributions."""
    return tuple(_distributions())


def named_lengths(name: str) -> tuple[str, np.ndarray]:
    """Return the source and the lengths [``NAMED_DOCUMENTS``], ascending, of a distribution.

    ``distributions.json`` contains quantiles. A quantile is a fraction of the documents, shortest
    first, and the length in tokens of the longest of them. The logarithm of the length is
    interpolated linearly between quantiles.
    """
    entry = _distributions()[name]
    levels, tokens = zip(*entry["quantiles"], strict=True)
    at = (np.arange(NAMED_DOCUMENTS) + 0.5) / NAMED_DOCUMENTS
    return entry["source"], np.rint(np.exp(np.interp(at, levels, np.log(tokens)))).astype(np.int64)


def _distributions() -> dict:
    file = resources.files("megatron_epp.corpus").joinpath("distributions.json")
    return json.loads(file.read_text())


def _no_corpus(text: str) -> str:
    names = distribution_names()
    path = Path(text)
    expected = "a text file of lengths, a Megatron .idx, texts in .jsonl or .parquet, or one of "
    expected += ", ".join(names)
    if path.exists():
        what = "a folder" if path.is_dir() else "not a regular file"
        return f"{quoted(text)}: is {what}; expected {expected}"
    nearby = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(text, names, n=2)
    near += [
        str(path.with_name(name)) for name in difflib.get_close_matches(path.name, nearby, n=1)
    ]
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{quoted(text)}: no such file or distribution; {hint}expected {expected}"
