"""Lengths of texts and chats: what is a document, how it is counted, what is refused."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_epp import __main__
from megatron_epp.corpus import text_lengths
from megatron_epp.corpus.lengths import open_corpus
from tests.cli.commands import Commands

CHAT = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}]
ROWS = [
    {"text": "one two three four", "id": 7},
    {"messages": CHAT},
    {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": None}]},
    {"prompt": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "image"}]}],
     "completion": "two three"},
    {"text": ""},
]  # fmt: skip
# Words, and four tokens of markup a message.
WORDS = [4, 3 + 8, 1 + 8, 3 + 8]
BYTES = [5, 3 + 8, 1 + 8, 3 + 8]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n \n")
    return path


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A folder with a tokenizer to which every word is a token, and which marks the beginning."""
    tokenizers = pytest.importorskip("tokenizers")
    names = {word: n for n, word in enumerate(("[CLS]", "[UNK]", "one", "two", "three"))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", 0)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_texts_and_chats_are_counted_by_bytes_or_by_a_tokenizer(chats: Path, words: Path) -> None:
    by_bytes = open_corpus(str(chats))
    assert by_bytes.inputs.tolist() == BYTES and by_bytes.note == "4 bytes a token"
    assert by_bytes.counts.skipped == 1
    by_words = open_corpus(str(chats), 9, tokenizer=str(words))
    assert by_words.inputs.tolist() == [4, 9, 9, 9] and by_words.counts.truncated == 2
    assert by_words.note == f"tokens by {words}"


def test_a_long_file_is_drawn_from_evenly_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(text_lengths, "MOST_DRAWN", 5)
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": "abcd" * n}) for n in range(1, 42)))
    assert open_corpus(str(path)).inputs.tolist() == [1, 11, 21, 31, 41]
    machine = "--model llama3-8b --device h100-80g --pp 2 --tp 8"
    told = Commands(capsys).joined(f"compare --lengths {path} {machine} --planner packing")
    assert "5 of 41 documents, evenly drawn; 4 bytes a token" in told


@pytest.mark.skipif(find_spec("pyarrow") is None, reason="pyarrow is not installed")
def test_rows_of_parquet_are_those_of_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "chats.parquet"
    rows = [{"messages": CHAT, "id": n} for n in range(9)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    assert open_corpus(str(path)).inputs.tolist() == [BYTES[1]] * 9
    monkeypatch.setattr(text_lengths, "MOST_DRAWN", 3)
    assert open_corpus(str(path)).note.startswith("3 of 9 documents")
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), path)
    with pytest.raises(ValueError, match="has the columns a; expected an object with text"):
        open_corpus(str(path))
    path.write_bytes(b"PAR1, but no more")
    with pytest.raises(ValueError, match="cannot be read as parquet"):
        open_corpus(str(path))


@pytest.mark.skipif(find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_what_is_not_installed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "x.parquet").write_bytes(b"")
    machine = "--model llama3-8b --device h100-80g --gpus 8"
    told = Commands(capsys).refused(f"tune --lengths {tmp_path}/x.parquet {machine}")
    assert "this needs pyarrow, which is not installed: pip install '.[lengths]'" in told
    assert "setup_env" not in told


def test_a_remedy_names_the_script_only_for_what_it_installs(capsys, monkeypatch) -> None:
    installed = (Path(__file__).parents[2] / "requirements.txt").read_text()
    installed += "tokenizers"  # transformers' own
    for name in __main__._EXTRAS:

        def missing(command: str, name: str = name) -> None:
            raise ModuleNotFoundError(name=name)

        monkeypatch.setattr(__main__, "import_module", missing)
        assert __main__.main(["check", "p.plan"]) == 2
        said = capsys.readouterr().err
        assert f"this needs {name}" in said and ("setup_env.sh" in said) == (name in installed)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 2: no JSON"),
        ("[" * 100_000, "line 2: no JSON"),
        ("[1]", "line 2: [1]: expected an object with text, messages, conversations or prompt"),
        ('{"te\\u001bxt": 1}', r"line 2: has te\x1bxt; expected"),
        ('{"text": 3}', "line 2: text: 3: expected a text"),
        ('{"messages": "hello"}', "line 2: messages 'hello': expected a list of messages"),
        ('{"messages": [{"role": "user"}]}', "expected a text, or a message with content"),
        (
            '{"messages": [{"role": "robot", "content": "a"}]}',
            "role 'robot': expected one of system, user, tool, assistant",
        ),
    ],
)
def test_a_line_that_is_no_document_is_named(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "one"}\n' + line)
    with pytest.raises(ValueError) as error:
        open_corpus(str(path))
    assert why in str(error.value) and str(error.value).isprintable()


def test_tokenizers_that_cannot_be_used_are_refused(chats: Path, tmp_path: Path) -> None:
    def refused(lengths: object, told: str) -> None:
        with pytest.raises(ValueError, match=told):
            open_corpus(str(lengths), tokenizer=str(tmp_path))

    refused(chats, r"no such file, or no tokenizer\.json in it")
    refused("wlb", "the lengths of wlb are tokens already")
    chats.with_name("empty.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(ValueError, match="holds no document with a token"):
        open_corpus(str(chats.with_name("empty.jsonl")))
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text('{"no": "tokenizer"}')
    refused(chats, r"tokenizer\.json: cannot be read")
