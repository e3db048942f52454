"""A corpus holds the text it was made of, token for token, and Megatron's own tokenizer agrees."""

import argparse
import json
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


def test_jsonl_with_the_tokenizer_of_another_corpus(script, folder, tmp_path, capsys) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert run(script, folder, "-o", first, "--vocab-size", 300) == 0
    lines = tmp_path / "lines.jsonl"
    texts = ["zero", "one\ntwo", "", "a \u2581 b"]
    lines.write_text("\n\n".join(json.dumps({"body": text}) for text in texts))
    arguments = ["--json-key", "body", "--tokenizer-model", f"{first}.model"]
    assert run(script, lines, "-o", second, *arguments) == 0
    assert not Path(f"{second}.model").exists()
    decoded = [processor_of(first).decode(ids) for ids in stored(second)]
    assert decoded == ["zero", "one\ntwo", "a   b"]  # sentencepiece's own mark becomes a blank
    assert "not as they were after decode(encode()): 1 documents, the first" in (
        capsys.readouterr().out
    )


def test_workers_and_runs_agree(script, folder: Path, tmp_path: Path) -> None:
    assert run(script, folder, "-o", tmp_path / "one", "--vocab-size", 300) == 0
    words = (folder, "-o", tmp_path / "two", "--vocab-size", 300, "--workers", 2)
    done = python(SCRIPT, *words)
    assert done.returncode == 0, done.stderr
    assert "documents: 100%" in done.stderr  # the progress bar
    for suffix in ("bin", "idx", "model"):
        assert (tmp_path / f"one.{suffix}").read_bytes() == (
            tmp_path / f"two.{suffix}"
        ).read_bytes()


def test_shuffling_keeps_the_documents(script, folder: Path, tmp_path: Path) -> None:
    for number in range(20):
        (folder / f"n{number:02}.txt").write_text(f"number {number}")
    orders = []
    for arguments in ([], ["--shuffle", 1], ["--shuffle", 1], ["--shuffle", 2]):
        assert run(script, folder, "-o", tmp_path / "c", "--vocab-size", 300, *arguments) == 0
        orders.append([processor_of(tmp_path / "c").decode(ids) for ids in stored(tmp_path / "c")])
    assert orders[1] == orders[2] != orders[3]
    assert orders[1] != orders[0]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[3])


def test_histogram_is_the_measured_tail(script) -> None:
    lengths = numpy.array([10] * 50 + [100] * 30 + [1000] * 19 + [20_000])
    lines = script.histogram(lengths).split("\n")
    assert lines[:3] == [
        "100 documents, 42,500 tokens",
        "tokens of a document: mean 425, median 55, 90% 1,000, 99% 1,190, longest 20,000",
        "the longest 1% of the documents hold 47% of the tokens",
    ]
    assert "           513 - 1,024         19           44.7%  ##################" in lines
    # A power of two is the last of its bin.
    assert "65 - 128          1" in script.histogram(numpy.array([128, 129]))


def test_standard_library_is_found(script) -> None:
    options = script.parse(["--standard-library", "-o", "x"])
    paths = [place.path for place in script.find_documents(options)]
    assert any(path.endswith("/asyncio/base_events.py") for path in paths)
    assert not any("site-packages" in path for path in paths)
    assert paths == sorted(paths)


@pytest.mark.parametrize(
    ("make", "arguments", "line"),
    [
        (None, [], "nowhere: no such file or folder"),
        ("folder", ["--glob", "*.c"], "no file matches *.c; name others with --glob"),
        ("list.jsonl", [], 'byte 0: no text under "text"; name the key with --json-key'),
        ("broken.jsonl", [], "byte 14: not a line of JSON"),
        ("folder", ["--vocab-size", "30000"], "30000 does not fit this text: Vocabulary size"),
        ("folder", ["--tokenizer-model", str(SCRIPT)], "is not a sentencepiece model"),
        ("empties", ["--tokenizer-model", "MODEL"], "1 of 2 are not UTF-8, 1 are empty"),
    ],
)
def test_bad_input_has_one_line(
    script, folder: Path, tmp_path: Path, capsys, make: str | None, arguments: list[str], line: str
) -> None:
    source = {None: tmp_path / "nowhere", "folder": folder}.get(make, tmp_path / str(make))
    if make == "empties":
        source.mkdir()
        (source / "a.txt").write_bytes(b"")
        (source / "b.txt").write_bytes(b"\xff")
        assert run(script, folder, "-o", tmp_path / "m", "--vocab-size", 300) == 0
        arguments = ["--tokenizer-model", str(tmp_path / "m.model")]
    elif make and make != "folder":
        source.write_text("[1]\n" if make == "list.jsonl" else '{"text": "a"}\n{\n')
    capsys.readouterr()
    assert run(script, source, "-o", tmp_path / "out", *arguments) == 2
    said = capsys.readouterr().err.strip().split("\n")
    assert len(said) == 1
    assert line in said[0]
    assert not list(tmp_path.glob("out.*"))


@pytest.mark.parametrize(
    "words", ["--vocab-size 0", "--sample-mb inf", "--sample-mb nan", "--workers 0", "-o ."]
)
def test_numbers_that_cannot_be(script, capsys, words: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        script.parse(["texts", "-o", "x", *words.split()])
    assert "expected a" in (said := capsys.readouterr().err) or "must be positive" in said
