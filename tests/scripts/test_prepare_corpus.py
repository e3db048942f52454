"""A corpus holds the text it was made of, token for token, and Megatron's own tokenizer agrees."""

import argparse
from pathlib import Path
from types import ModuleType

import numpy
import pytest
import sentencepiece
from megatron.core.datasets.indexed_dataset import IndexedDataset

from tests.programs import loaded, python

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_corpus.py"

TEXTS = {
    "a.txt": "def f(x):\n    if x:\n\t\treturn  x   \n\n\n",
    "b.txt": "\r\n  naïve 漢字 😀 \x00 \ufeff end without newline",
    "deep/c.txt": "one two three four five\n" * 200,
    "deep/skip.md": "not asked for",
    "empty.txt": "",
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return loaded(SCRIPT)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in TEXTS.items():
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    (tmp_path / "texts" / "latin.txt").write_bytes("é".encode("latin-1"))
    return tmp_path / "texts"


def run(script: ModuleType, *arguments: object) -> int:
    return script.main([*map(str, arguments), "--workers", "1", "--quiet"])


def stored(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(str(prefix))
    assert len(dataset) == len(dataset.document_indices) - 1  # one sequence per document
    return [dataset[number].tolist() for number in range(len(dataset))]


def processor_of(prefix: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")


def test_a_folder_comes_back(script, folder: Path, tmp_path: Path, capsys) -> None:
    prefix = tmp_path / "out" / "corpus"
    assert run(script, folder, "-o", prefix, "--vocab-size", 320) == 0
    processor = processor_of(prefix)
    documents = stored(prefix)
    assert processor.get_piece_size() == 320
    assert [processor.decode(ids) for ids in documents] == [
        TEXTS["a.txt"],
        TEXTS["b.txt"],
        TEXTS["deep/c.txt"],
    ]
    # Encoding line by line is encoding the text.
    assert documents == [processor.encode(TEXTS[n]) for n in ("a.txt", "b.txt", "deep/c.txt")]
    said = capsys.readouterr().out
    assert "left out: 1 documents that are not UTF-8, 1 that are empty" in said
    assert "decode(encode(text)) == text for every document; no unknown token" in said
    assert not list(tmp_path.rglob("*.partial"))


def test_megatrons_tokenizer_agrees(script, folder: Path, tmp_path: Path) -> None:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    prefix = tmp_path / "corpus"
    assert run(script, folder, "-o", prefix, "--vocab-size", 320, "--append-eod") == 0
    flags = argparse.Namespace(
        tokenizer_type="SentencePieceTokenizer",
        tokenizer_model=f"{prefix}.model",
        tokenizer_sentencepiece_ignore_extra_whitespaces=True,
        tokenizer_sentencepiece_legacy=False,
        chat_template=None,
        special_tokens=None,
        metadata_path=None,
        pad_vocab_size=True,
        make_vocab_size_divisible_by=128,
        tensor_model_parallel_size=1,
        rank=1,
    )
    tokenizer = build_tokenizer(flags)
    assert (tokenizer.vocab_size, flags.padded_vocab_size) == (320, 384)
    assert (tokenizer.unk, tokenizer.bos, tokenizer.eod, tokenizer.pad) == (0, 1, 2, 3)
    for ids, name in zip(stored(prefix), ("a.txt", "b.txt", "deep/c.txt"), strict=True):
        assert ids == [*tokenizer.tokenize(TEXTS[name]), tokenizer.eod]
        assert tokenizer.detokenize(ids[:-1]) == TEXTS[name]
        assert not {tokenizer.unk, tokenizer.bos, tokenizer.pad} & set(ids)


@pytest.mark.everything
def test_workers_runs_and_shuffled_orders_agree(script, folder: Path, tmp_path: Path) -> None:
    words = ("--vocab-size", 300, "--shuffle", 1)
    assert run(script, folder, "-o", tmp_path / "one", *words) == 0
    done = python(SCRIPT, folder, "-o", tmp_path / "two", *words, "--workers", 2)
    assert done.returncode == 0, done.stderr
    assert "documents: 100%" in done.stderr  # the progress bar
    for suffix in ("bin", "idx", "model"):
        first, second = (tmp_path / f"{name}.{suffix}" for name in ("one", "two"))
        assert first.read_bytes() == second.read_bytes()
    model = ("--tokenizer-model", f"{tmp_path}/one.model")
    assert run(script, folder, "-o", tmp_path / "by-path", *model) == 0
    by_path, shuffled = stored(tmp_path / "by-path"), stored(tmp_path / "one")
    assert by_path != shuffled and sorted(by_path) == sorted(shuffled)


def test_histogram_is_the_measured_tail(script) -> None:
    lengths = numpy.array([10] * 50 + [100] * 30 + [1000] * 19 + [20_000])
    lines = script.histogram(lengths).split("\n")
    assert lines[1].endswith("mean 425, median 55, 90% 1,000, 99% 1,190, longest 20,000")
    assert "           513 - 1,024         19           44.7%  ##################" in lines


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("nowhere", None, "nowhere: no such file or folder"),
        ("list.jsonl", "[1]\n", 'byte 0: no text under "text"; name the key with --json-key'),
        ("broken.jsonl", '{"text": "a"}\n{\n', "byte 14: not a line of JSON"),
        ("short.jsonl", '{"text": "a"}\n', "8192 does not fit this text: Vocabulary size"),
    ],
)
def test_bad_input_has_one_line(
    script, tmp_path: Path, capsys, name: str, text: str | None, line: str
) -> None:
    source = tmp_path / name
    if text is not None:
        source.write_text(text)
    assert run(script, source, "-o", tmp_path / "out") == 2
    (said,) = capsys.readouterr().err.strip().split("\n")
    assert line in said
    assert not list(tmp_path.glob("out.*"))
