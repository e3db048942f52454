#!/usr/bin/env python3
"""Writer of a Megatron corpus of real text: PREFIX.bin, PREFIX.idx and the tokenizer PREFIX.model.

    prepare_corpus.py texts/ --glob '*.txt' --glob '*.md' -o data/texts
    prepare_corpus.py pages.jsonl --json-key text --append-eod -o data/pages
    prepare_corpus.py --standard-library -o data/stdlib      the source text of this Python
    prepare_corpus.py --chat chats.jsonl -o data/chats       conversations, with their loss masks

Each file, or each line of the .jsonl, is a document, and each document is one sequence of the
index, in the order of the paths or lines. Train on the corpus with --data-path PREFIX
--tokenizer-type SentencePieceTokenizer --tokenizer-model PREFIX.model.

A line of --chat is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}.
Each conversation is a document. Megatron's SFTTokenizer determines its tokens and which of them are
targets. PREFIX_mask.bin/.idx mark the targets; training finds these files by itself. Train on the
corpus with --tokenizer-type SFTTokenizer --tokenizer-model PREFIX.tokenizer.

The tokenizer of texts (byte-pair encoding, sentencepiece) preserves texts: it has no normalisation,
adds and removes no blanks, and encodes unknown characters as bytes. Therefore decode(encode(text))
== text. The script checks every document and counts exceptions. The only known exception is U+2581,
which sentencepiece uses for a blank and decodes to a blank.
"""

import argparse
import contextlib
import fnmatch
import io
import json
import logging
import math
import multiprocessing
import os
import random
import shutil
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import sentencepiece
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# A tokenizer's special tokens; the end of a sentence is Megatron's end of a document (eod).
SPECIAL_IDS: dict[str, Any] = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": 3}
TRAINING_LINE = 4000  # characters: sentencepiece skips longer lines than it is told to expect
BAR = 40
# Of Megatron's SFTTokenizer, as megatron_epp/mcore/data/conversations.py has them.
CHAT_FORMATS = ("nemotron-h-aligned", "nemotron-nano-v2", "identity", "default")


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a document: a file, or ``size`` bytes (a line of JSON) from ``start`` on."""

    path: str
    start: int = 0
    size: int = -1


def find_files(folder: Path, globs: Sequence[str], excludes: Sequence[str]) -> list[Place]:
    """Return the files below ``folder`` whose names match one of ``globs``, by relative path.

    ``excludes`` are patterns of relative paths, with / between parts: ``*/tests/data/*``.
    """
    found = []
    for path in folder.rglob("*"):
        relative = path.relative_to(folder).as_posix()
        if (
            any(fnmatch.fnmatchcase(path.name, glob) for glob in globs)
            and not any(fnmatch.fnmatchcase(relative, exclude) for exclude in excludes)
            and path.is_file()
        ):
            found.append((relative, Place(str(path))))
    if not found:
        raise ValueError(f"{folder}: no file matches {' '.join(globs)}; name others with --glob")
    return [place for _, place in sorted(found)]


def find_lines(path: Path) -> list[Place]:
    """Return the nonblank lines of a .jsonl, in order."""
    from megatron_epp.safe_files import bounded_lines

    places = []
    start = 0
    for _, line in bounded_lines(path, "one JSON object per line"):
        if line.strip():
            places.append(Place(str(path), start, len(line)))
        start += len(line)
    if not places:
        raise ValueError(f"{path}: holds no line; expected one JSON object per line")
    return places


def read_document(place: Place, json_key: str) -> str | None:
    """Return the text of a document; None if it is not UTF-8, or has half of a surrogate pair.

    Raises:
        ValueError: a line is not a JSON object with a text under ``json_key``
    """
    with open(place.path, "rb") as file:
        file.seek(place.start)
        raw = file.read(place.size)
    if place.size < 0:
        try:
            return raw.decode("utf-8")  # no newline is translated
        except UnicodeDecodeError:
            return None
    where = f"{place.path}, byte {place.start}"
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not a line of JSON: {error}") from None
    text = value.get(json_key) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise ValueError(f'{where}: no text under "{json_key}"; name the key with --json-key')
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return None
    return text


def training_lines(
    places: Sequence[Place], json_key: str, sample_bytes: int, progress: tqdm
) -> Iterator[str]:
    """Yield the tokenizer's training text: lines of random documents, equal in every run."""
    order = list(range(len(places)))
    random.Random(0).shuffle(order)
    taken = 0
    for number in order:
        text = read_document(places[number], json_key) or ""
        # No single document may be most of the sample.
        text = text[: max(sample_bytes // 10, TRAINING_LINE)]
        for line in text.split("\n"):
            for at in range(0, len(line), TRAINING_LINE):
                yield line[at : at + TRAINING_LINE]
        taken += len(text)
        progress.update(len(text))
        if taken >= sample_bytes:
            return


def train_tokenizer(lines: Sequence[str], vocab_size: int) -> bytes:
    """Return a sentencepiece model of ``vocab_size`` pieces.

    The pieces include 4 special tokens and 256 bytes.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,  # indentation
            split_digits=True,
            max_sentence_length=4 * TRAINING_LINE,
            num_threads=4,  # recorded in the model: the same everywhere
            minloglevel=2,
            **SPECIAL_IDS,
        )
    except RuntimeError as error:
        # "INTERNAL: file(line) [condition] Vocabulary size too high (9). Please set it to ..."
        reason = str(error).rpartition("] ")[2].strip()
        raise ValueError(f"--vocab-size {vocab_size} does not fit this text: {reason}") from None
    return model.getvalue()


@dataclass(frozen=True, slots=True)
class Encoder:
    """Callable that converts text to token ids."""

    processor: sentencepiece.SentencePieceProcessor
    by_line: bool

    def __call__(self, text: str) -> list[int]:
        if not self.by_line:
            return self.processor.encode(text)
        # No piece of a tokenizer trained here holds a newline, and nothing is put before a text:
        # the lines' tokens are the text's. Line by line is three times as fast.
        *lines, last = text.split("\n")
        encoded = self.processor.encode([*(line + "\n" for line in lines), last])
        return [token for line in encoded for token in line]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of a document, and checks of their decoding."""

    place: Place
    tokens: numpy.ndarray | None  # None: not UTF-8
    comes_back: bool = True  # decode(encode(text)) == text
    unknown: int = 0


def encode_document(place: Place, encoder: Encoder, json_key: str, eod: int | None) -> Encoded:
    text = read_document(place, json_key)
    if text is None:
        return Encoded(place, None)
    ids = encoder(text)
    comes_back = encoder.processor.decode(ids) == text
    unknown = ids.count(encoder.processor.unk_id())
    if ids and eod is not None:
        ids.append(eod)
    return Encoded(place, numpy.array(ids, numpy.int32), comes_back, unknown)


class _Worker:
    """State that a worker process keeps between documents."""

    encode: Callable[[Place], Encoded]

    @staticmethod
    def start(model: bytes, by_line: bool, json_key: str, eod: int | None) -> None:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        _Worker.encode = partial(
            encode_document, encoder=Encoder(processor, by_line), json_key=json_key, eod=eod
        )

    @staticmethod
    def work(place: Place) -> Encoded:
        return _Worker.encode(place)


def encode_all(
    places: Sequence[Place],
    model: bytes,
    by_line: bool,
    json_key: str,
    eod: int | None,
    workers: int,
) -> Iterator[Encoded]:
    """Yield every document's tokens, in order, from ``workers`` processes."""
    arguments = (model, by_line, json_key, eod)
    if workers == 1:
        _Worker.start(*arguments)
        yield from map(_Worker.work, places)
        return
    # Spawned, not forked: the parent will have imported torch, which has threads.
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _Worker.start, arguments) as pool:
        yield from pool.imap(_Worker.work, places, chunksize=8)


def open_builder(path: Path, vocab_size: int) -> Any:
    """Return Megatron's writer of .bin and .idx."""
    with quiet():
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    return IndexedDatasetBuilder(str(path), dtype=DType.optimal_dtype(vocab_size))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings of Megatron's import about missing optional packages and GPUs."""
    torch_log = logging.getLogger("torch.utils.cpp_extension")
    level = torch_log.level
    torch_log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch_log.setLevel(level)


def histogram(lengths: numpy.ndarray) -> str:
    """Return the numbers of documents and tokens by length, as text.

    Each bin is twice as wide as the previous one. ``lengths`` are the tokens of the documents:
    [documents].
    """
    tokens = int(lengths.sum())
    p50, p90, p99 = numpy.percentile(lengths, [50, 90, 99])
    longest = numpy.sort(lengths)[::-1]
    head = longest[: max(1, len(longest) // 100)]
    lines = [
        f"{len(lengths):,} documents, {tokens:,} tokens",
        f"tokens of a document: mean {lengths.mean():,.0f}, median {p50:,.0f}, "
        f"90% {p90:,.0f}, 99% {p99:,.0f}, longest {longest[0]:,}",
        f"the longest 1% of the documents hold {head.sum() / tokens:.0%} of the tokens",
        "",
        f"{'tokens of a document':>22} {'documents':>10} {'share of tokens':>16}",
    ]
    # Bin b holds lengths in (2^(b-1), 2^b]; the shortest are taken together.
    bins = numpy.maximum(numpy.ceil(numpy.log2(numpy.maximum(lengths, 1))), 6).astype(int)
    for b in range(bins.min(), bins.max() + 1):
        inside = lengths[bins == b]
        share = inside.sum() / tokens
        low = 0 if b == 6 else 2 ** (b - 1)
        bounds = f"{low + 1:,} - {2**b:,}"
        lines.append(f"{bounds:>22} {len(inside):>10,} {share:>15.1%}  {'#' * round(BAR * share)}")
    return "\n".join(line.rstrip() for line in lines)


def prepare(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Find the documents, train the tokenizer, and write the corpus."""
    places = find_documents(options)
    options.output.parent.mkdir(parents=True, exist_ok=True)  # what cannot be, before the work
    total_bytes = sum(
        place.size if place.size >= 0 else os.path.getsize(place.path) for place in places
    )
    say(f"{len(places):,} documents found, {total_bytes / 1e6:,.1f} MB")

    model_path = Path(f"{options.output}.model")
    if options.tokenizer_model is None:
        sample = min(total_bytes, int(options.sample_mb * 1e6))
        with show(options, total=sample, unit="B", unit_scale=True, desc="tokenizer") as progress:
            lines = list(training_lines(places, options.json_key, sample, progress))
            if not any(lines):
                raise ValueError("no document with text to train a tokenizer on")
            model = train_tokenizer(lines, options.vocab_size)
    else:
        model_path = options.tokenizer_model
        model = read_model(model_path)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    eod = processor.eos_id() if options.append_eod else None
    if eod == -1:
        raise ValueError(f"{model_path}: has no end-of-sentence token for --append-eod to append")

    # In a folder of their own until they are whole, where nobody has put a link under their names;
    # and the index last: what can be opened is complete.
    with tempfile.TemporaryDirectory(dir=options.output.parent, prefix=".corpus-") as scratch:
        whole = {suffix: Path(scratch, suffix) for suffix in ("model", "bin", "idx")}
        lengths, notes = write_corpus(places, options, model, eod, whole["bin"], whole["idx"])
        if options.tokenizer_model is None:
            whole["model"].write_bytes(model)
        for suffix, path in whole.items():
            if path.exists():
                path.replace(f"{options.output}.{suffix}")
        for suffix in ("bin", "idx"):  # of conversations that stood under this name
            Path(f"{options.output}_mask.{suffix}").unlink(missing_ok=True)

    say("\n".join([histogram(lengths), "", *notes]))
    say(f"wrote {options.output}.bin and .idx; train with")
    say(f"  --data-path {options.output} --tokenizer-type SentencePieceTokenizer")
    say(f"  --tokenizer-model {model_path}      ({processor.get_piece_size()} pieces)")


# ------------------------------------------------------------------ conversations

# What Megatron's chat formats put between the turns, and name in Python, is one token each.
CHAT_TOKENS = ["<unk>", "</s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<SPECIAL_233>"]
CHAT_ROLES = "System\nUser\nAssistant\n"


def prepare_chat(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Train a tokenizer if none is given, and write the conversations and their loss masks."""
    with quiet():
        try:
            import transformers  # noqa: F401  it says that it is missing before the work
        except ImportError:
            raise ValueError("--chat needs the package transformers: pip install it") from None
        from megatron_epp.mcore.data.conversations import read_lines, unread_line, write_encoded

    path: Path = options.chat
    if not path.is_file():
        raise ValueError(f"{path}: no such file; expected a .jsonl of conversations")
    unread: set[tuple[str, str]] = set()
    lines = sum(1 for _ in read_lines(path, unread))  # whatever is wrong with one is said at once
    if (line := unread_line(path, unread, options.chat_format)) is not None:
        print(line, file=sys.stderr)
    if not lines:
        raise ValueError(f"{path}: holds no line; expected one conversation per line")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    folder = options.tokenizer_model
    with tempfile.TemporaryDirectory(dir=options.output.parent, prefix=".tokenizer-") as scratch:
        if folder is None:
            if options.chat_format == "default":
                raise ValueError(
                    "--chat-format default is the tokenizer's own: give a --tokenizer-model that "
                    "has a chat template"
                )
            folder = Path(f"{options.output}.tokenizer")
            trained = Path(scratch, "tokenizer")
            train_chat_tokenizer(path, options, trained)
        elif not folder.exists():
            raise ValueError(f"{folder}: no such folder; expected the files of a tokenizer")
        else:
            trained = folder
        encoded = encode_chat(path, trained, options)
        vocabulary = _chat_tokenizer(trained, options.chat_format).vocab_size
        with show(options, encoded, total=lines, unit="line", desc="conversations") as bar:
            written = write_encoded(bar, path, vocabulary, options.output)
        if trained is not folder:
            shutil.rmtree(folder, ignore_errors=True)
            trained.replace(folder)
    say(f"{histogram(written.lengths)}\n\n{written}")
    say(f"wrote {options.output}.bin and .idx, and the loss masks beside them; train with")
    say(f"  --data-path {options.output} --tokenizer-type SFTTokenizer")
    say(f"  --tokenizer-model {folder} --sft-tokenizer-prompt-format {options.chat_format}")


def train_chat_tokenizer(path: Path, options: argparse.Namespace, folder: Path) -> None:
    """Train a byte-level BPE tokenizer on the conversations; write it as a transformers folder."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    from megatron_epp.mcore.data.conversations import read_lines

    def texts() -> Iterator[str]:
        taken = 0
        for _, messages in read_lines(path):
            for message in messages:
                yield CHAT_ROLES + message["content"]
                taken += len(message["content"])
            if taken >= options.sample_mb * 1e6:
                return

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=CHAT_TOKENS[0]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts(),
        tokenizers.trainers.BpeTrainer(
            vocab_size=options.vocab_size,
            special_tokens=CHAT_TOKENS,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=CHAT_TOKENS[0], eos_token=CHAT_TOKENS[1]
    ).save_pretrained(folder)


def _chat_tokenizer(folder: Path, chat_format: str) -> Any:
    with quiet():
        from megatron.core.tokenizers.text.libraries.sft_tokenizer import SFTTokenizer
    try:
        return SFTTokenizer(str(folder), chat_format)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder}: cannot be read as a tokenizer: {reason[:200]}") from error


class _ChatWorker:
    """State that a worker process keeps between lines."""

    encode: Callable[[Any], Any]

    @staticmethod
    def start(path: Path, folder: Path, chat_format: str, package: str) -> None:
        if package not in sys.path:
            sys.path.insert(0, package)
        with quiet():
            from megatron_epp.mcore.data.conversations import encode_line
        tokenizer = _chat_tokenizer(folder, chat_format)
        _ChatWorker.encode = partial(
            encode_line, path=path, tokenizer=tokenizer, chat_format=chat_format
        )

    @staticmethod
    def work(numbered: Any) -> Any:
        return _ChatWorker.encode(numbered)


def encode_chat(path: Path, folder: Path, options: argparse.Namespace) -> Iterator[Any]:
    """Yield tokens and masks of every line's conversations, in order."""
    from megatron_epp.mcore.data.conversations import read_lines

    package = str(Path(__file__).resolve().parents[1])
    arguments = (path, folder, options.chat_format, package)
    if options.workers == 1:
        _ChatWorker.start(*arguments)
        yield from map(_ChatWorker.work, read_lines(path))
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.workers, _ChatWorker.start, arguments) as pool:
        yield from pool.imap(_ChatWorker.work, read_lines(path), chunksize=16)


# ------------------------------------------------------------------ texts


def write_corpus(
    places: Sequence[Place],
    options: argparse.Namespace,
    model: bytes,
    eod: int | None,
    bin_path: Path,
    idx_path: Path,
) -> tuple[numpy.ndarray, list[str]]:
    """Encode and write all documents; return (tokens of each: [documents] int64, notes)."""
    vocab_size = sentencepiece.SentencePieceProcessor(model_proto=model).get_piece_size()
    builder = open_builder(bin_path, vocab_size)
    lengths: list[int] = []
    not_text, empty, unknown = 0, 0, 0
    changed: list[Place] = []
    by_line = options.tokenizer_model is None
    encoded = encode_all(places, model, by_line, options.json_key, eod, options.workers)
    for document in show(options, encoded, total=len(places), unit="document", desc="documents"):
        if document.tokens is None:
            not_text += 1
        elif not len(document.tokens):
            empty += 1
        else:
            builder.add_document(document.tokens, [len(document.tokens)])
            lengths.append(len(document.tokens))
            unknown += document.unknown
            if not document.comes_back:
                changed.append(document.place)
    if not lengths:
        raise ValueError(
            f"no document with text: {not_text} of {len(places)} are not UTF-8, {empty} are empty"
        )
    builder.finalize(str(idx_path))

    notes = []
    if not_text or empty:
        notes.append(f"left out: {not_text} documents that are not UTF-8, {empty} that are empty")
    if changed or unknown:
        example = f", the first {changed[0].path} (byte {changed[0].start})" if changed else ""
        notes.append(
            f"not as they were after decode(encode()): {len(changed)} documents{example}; "
            f"{unknown} unknown tokens"
        )
    else:
        notes.append("decode(encode(text)) == text for every document; no unknown token")
    return numpy.array(lengths, numpy.int64), notes


def show(options: argparse.Namespace, items: Iterator | None = None, **settings: Any) -> tqdm:
    """Return a progress bar on stderr, over ``items`` or advanced by its owner."""
    return tqdm(items, disable=options.quiet, mininterval=1.0, file=sys.stderr, **settings)


def find_documents(options: argparse.Namespace) -> list[Place]:
    if options.standard_library:
        # A venv's standard library is that of the Python it was made with.
        folder = Path(sysconfig.get_paths()["stdlib"])
        # Packages that were installed into it; deliberately broken sources of a converter's tests.
        excludes = ["site-packages/*", "dist-packages/*", "lib2to3/tests/data/*"]
        places = find_files(folder, ["*.py"], [*excludes, *options.exclude])
    elif options.input.is_dir():
        places = find_files(options.input, options.glob or ["*.txt"], options.exclude)
    elif not options.input.is_file():
        what = "no plain file" if options.input.exists() else "no such file or folder"
        raise ValueError(f"{options.input}: {what}; expected a folder of text files, or a .jsonl")
    elif options.input.suffix == ".jsonl":
        places = find_lines(options.input)
    else:
        raise ValueError(f"{options.input}: expected a folder of text files, or a .jsonl")
    if options.shuffle is not None:
        random.Random(options.shuffle).shuffle(places)
    return places


def read_model(path: Path) -> bytes:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; expected a sentencepiece model")
    model = path.read_bytes()
    try:
        sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError:
        raise ValueError(f"{path}: is not a sentencepiece model") from None
    return model


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("input", nargs="?", type=Path, help="a folder of text files, or a .jsonl")
    add("--standard-library", action="store_true", help="instead: the *.py files of this Python")
    add("--chat", type=Path, metavar="FILE", help="instead: a .jsonl of conversations")
    add("--chat-format", default="nemotron-h-aligned", choices=CHAT_FORMATS, help="of the turns")
    add("-o", "--output", type=Path, required=True, metavar="PREFIX", help="of what is written")
    add("--glob", action="append", help="file names to take from the folder (default *.txt)")
    add("--exclude", action="append", default=[], help="relative paths to leave out (pattern)")
    add("--json-key", default="text", help="where a line's text is (default text)")
    add("--shuffle", type=int, metavar="SEED", help="order the documents at random, not by path")
    add("--append-eod", action="store_true", help="end every document with the eod token")
    add("--vocab-size", type=int, default=8192, help="pieces of the tokenizer (default 8192)")
    add(
        "--tokenizer-model",
        type=Path,
        help="use this sentencepiece model (with --chat: folder of transformers'), train none",
    )
    add("--sample-mb", type=float, default=10.0, help="text to train it on, MB (default 10)")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    add("--quiet", action="store_true", help="no progress bars")
    options = parser.parse_args(arguments)
    if sum((options.input is not None, options.standard_library, options.chat is not None)) != 1:
        parser.error(
            "give a folder or a .jsonl, or --standard-library, or --chat FILE: one of them"
        )
    if options.workers < 1 or not 0 < options.sample_mb < math.inf:
        parser.error("--workers and --sample-mb must be positive")
    if not 0 < options.vocab_size < 2**31:
        parser.error(f"--vocab-size {options.vocab_size}: expected a number of pieces, as 8192")
    if not options.output.name:
        parser.error("-o: expected a PREFIX, as data/pages")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):  # names that the terminal cannot print are escaped
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    options = parse(arguments)
    try:
        (prepare if options.chat is None else prepare_chat)(options, say=print)
    except (ValueError, OSError) as error:
        print(f"prepare_corpus: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
