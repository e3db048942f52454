"""Conversations become documents and masks, as Megatron's SFTTokenizer and SFTDataset say."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers.text.libraries.sft_tokenizer import SFTTokenizer

from megatron_epp import safe_files
from megatron_epp.corpus.lengths import open_corpus
from tests.mcore.chats import CHATS, SCRIPT, prepare, script, turns, write_chats
from tests.programs import python

ALIGNED, NANO = "nemotron-h-aligned", "nemotron-nano-v2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With chats.jsonl, and the tokenizer and corpus that were made of it."""
    folder = tmp_path_factory.mktemp("chats")
    assert prepare(write_chats(folder / "chats.jsonl"), folder / "made") == 0
    return folder


def stored(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(str(prefix))
    assert len(dataset) == len(dataset.document_indices) - 1
    return [dataset[number].tolist() for number in range(len(dataset))]


def targets_of(prefix: Path, tokenizer: SFTTokenizer) -> list[str]:
    """The text of every conversation's targets."""
    pairs = zip(stored(prefix), stored(Path(f"{prefix}_mask")), strict=True)
    return [
        tokenizer.ids_to_text([token for token, counts in zip(tokens, mask, strict=True) if counts])
        for tokens, mask in pairs
    ]


@pytest.fixture
def converted(folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """The corpus of chats by the folder's tokenizer; its prefix."""

    def convert(chats=CHATS, chat_format: str = ALIGNED, *more: object) -> Path:
        path = write_chats(tmp_path / "chats.jsonl", chats)
        tokenizer = ("--chat-format", chat_format, "--tokenizer-model", folder / "made.tokenizer")
        assert prepare(path, tmp_path / "made", *tokenizer, *more) == 0
        return tmp_path / "made"

    return convert


def tokenizer_of(folder: Path, chat_format: str = ALIGNED) -> SFTTokenizer:
    return SFTTokenizer(str(folder / "made.tokenizer"), chat_format)


@pytest.mark.parametrize("chat_format", [ALIGNED, NANO, "identity"])
def test_targets_are_those_of_megatrons_dataset(folder, converted, chat_format):
    """Of SFTDataset, on lines of one conversation; what it pads with, and the label in front of
    the padding, aside."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.datasets.utils import Split
    from megatron.core.tokenizers.utils.build_tokenizer import MegatronTokenizer
    from megatron.training.datasets.sft_dataset import SFTDataset

    tokenizer = MegatronTokenizer.from_pretrained(
        tokenizer_path=str(folder / "made.tokenizer"),
        metadata_path={"library": "sft"},
        prompt_format=chat_format,
    )
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=200,
        blend=([""], None),
        split="1,0,0",
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        context_parallel_size=1,
    )
    theirs = SFTDataset(CHATS, "", numpy.arange(len(CHATS)), len(CHATS), Split.train, config)
    ours = converted(chat_format=chat_format)
    tokens, masks = stored(ours), stored(Path(f"{ours}_mask"))
    for number, item in enumerate(theirs[number] for number in range(len(CHATS))):
        length = len(tokens[number])
        assert item["tokens"].tolist()[:length] == tokens[number]
        assert item["loss_mask"].tolist()[: length - 1] == masks[number][1:]
        assert not any(item["loss_mask"].tolist()[length - 1 :])


def test_a_line_of_several_conversations(folder: Path, converted) -> None:
    """Each begins with a message of the system; what comes before the first is one, too."""
    line = [*turns("a", "b", system=None), *turns("c", "d"), *turns("e", "f", "g", "h")]
    assert targets_of(converted([line]), tokenizer_of(folder)) == ["b\n", "d\n", "f\nh\n"]


@pytest.mark.everything
def test_planning_and_workers(folder, converted) -> None:
    """Lengths end at the last answer; several processes write the same bytes."""
    chats = [*CHATS, turns("no answer"), turns("an answer", "yes", "and a question behind it")]
    made = converted(chats)
    corpus = open_corpus(f"{made}.idx")
    assert len(corpus) == len(chats) - 1
    assert corpus.counts.untargeted == 1
    masks = stored(Path(f"{made}_mask"))
    needed = [max(at for at, counts in enumerate(mask) if counts) for mask in masks if any(mask)]
    assert list(corpus.in_order()) == needed
    assert needed[-1] < len(masks[-1]) - 1
    files = [Path(f"{made}{suffix}") for suffix in (".bin", ".idx", "_mask.bin", "_mask.idx")]
    alone = [file.read_bytes() for file in files]
    path, tokenizer = made.with_name("chats.jsonl"), folder / "made.tokenizer"
    words = ["--chat", path, "-o", made, "--chat-format", ALIGNED, "--workers", 2, "--quiet"]
    done = python(SCRIPT, *words, "--tokenizer-model", tokenizer)
    assert done.returncode == 0, done.stderr
    assert [file.read_bytes() for file in files] == alone


def weighing(chat: list[dict[str, str]], *weights: object) -> list[dict[str, object]]:
    """The conversation with a weight of each message, but where it is None."""
    pairs = zip(chat, weights, strict=True)
    return [{**one, **({} if weight is None else {"weight": weight})} for one, weight in pairs]


@pytest.mark.parametrize(
    ("chat_format", "end"), [(NANO, "\n<SPECIAL_12>\n"), (ALIGNED, "\n"), ("identity", "")]
)
def test_a_message_of_weight_0_is_not_learnt(folder: Path, converted, chat_format, end) -> None:
    chat = turns("a", "first answer", "b", "second answer", "c", "third answer")
    made = converted([weighing(chat, None, None, 0, None, 1, None, 1), chat], chat_format)
    weighed, plain = stored(made)
    assert weighed == plain, "what is read stays"
    learnt, whole = targets_of(made, tokenizer_of(folder, chat_format))
    assert "second" in learnt and "third" in learnt and "first" not in learnt
    assert whole.replace(f"first answer{end}", "") == learnt


def test_keys_that_nothing_reads_are_named(folder, tmp_path, capsys) -> None:
    lines = [{"messages": weighing(turns("a", "b"), 1, None, 1), "id": 7, "tools": []}]
    lines += [{"messages": [{**one, "name": "x"} for one in turns("c", "d")], "id": 8}]
    path = tmp_path / "keys.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert prepare(path, tmp_path / "keys", "--tokenizer-model", folder / "made.tokenizer") == 0
    said = f"{path}: keys that are not read: 'id', 'name' of messages, 'tools'"
    assert [line for line in capsys.readouterr().err.splitlines() if "not read" in line] == [said]


# --- what can be wrong


def line_of(*messages: object) -> str:
    return json.dumps({"messages": messages})


ANSWERED = line_of(*turns("a", "b"))
LONG = "\0" * (3 << 20)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{not json", "not a line of JSON: Expecting property name"),
        ('{"text": "a document"}', 'no conversation; expected {"messages": [{"role"'),
        (line_of(), "no conversation"),
        (line_of("hello"), "message 0 has no text as its 'role'"),
        (line_of({"role": "user", "content": None}), "no text as its 'content'"),
        (line_of(*turns("a")[1:], *turns("b", "c")[2:]), None),
        (
            line_of({"role": "assistant", "content": "first"}),
            "message 0: the assistant speaks after no message",
        ),
        (
            line_of(*turns("a", "b"), *turns("a", "b")[2:]),
            "message 3: the assistant speaks after assistant",
        ),
        (line_of(*turns("a", "")), "message 2: the assistant says nothing"),
        (
            line_of({"role": "narrator", "content": "once"}),
            "message 0: role 'narrator'; expected one of system, user, tool, assistant",
        ),
        ('{"messages": ' + "[" * 100_000, "not a line of JSON: "),
        # Not read whole.
        (LONG, "longer than 1 MiB; expected a line of JSON for each"),
        *(
            (line_of(*weighing(turns("a", "b"), 1, 1, weight)), "message 2 has the weight")
            for weight in (0.5, "1", -1, [0])
        ),
    ],
)
def test_a_line_that_is_no_conversation(folder, tmp_path, capsys, monkeypatch, line, said) -> None:
    monkeypatch.setattr(safe_files, "MOST_TEXT_BYTES", 1 << 20)
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{ANSWERED}\n\n{line}\n{ANSWERED}\n")
    status = prepare(path, tmp_path / "made", "--tokenizer-model", folder / "made.tokenizer")
    output = capsys.readouterr()
    if said is None:
        assert status == 0
        return
    assert status == 2
    assert output.err.startswith(f"prepare_corpus: {path}, line 3: ")
    assert said in output.err and output.err.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["chats.jsonl"]
    if line == LONG:  # of texts, too
        words = f"{path} -o {tmp_path}/made --workers 1 --quiet"
        assert script().main(words.split()) == 2
        assert f"{path}, line 3: longer than 1 MiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        (None, (), "chats.jsonl: no such file"),
        ("", (), "holds no line"),
        (line_of(*turns("a")), (), "no token of its 1 lines is a target"),
        (ANSWERED, ("--tokenizer-model", "nowhere"), "nowhere: no such folder"),
        (ANSWERED, ("--chat-format", "default"), "give a --tokenizer-model that has a chat"),
        # A folder without a chat template, in the format that asks for one.
        (
            ANSWERED,
            ("--chat-format", "default", "--tokenizer-model", "{folder}/made.tokenizer"),
            "chats.jsonl, line 1: SFTTokenizer refuses it in the format default: ",
        ),
    ],
)
def test_files_that_cannot_be_used(folder, tmp_path, capsys, text, more, said) -> None:
    path = tmp_path / "chats.jsonl"
    if text is not None:
        path.write_text(text)
    assert prepare(path, tmp_path / "made", *(word.format(folder=folder) for word in more)) == 2
    line = capsys.readouterr().err
    assert said in line and line.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["chats.jsonl"] * (text is not None)


def test_text_takes_the_place_of_chats(folder: Path, tmp_path: Path) -> None:
    """Masks that stood under the name go with the conversations they belonged to."""
    assert prepare(folder / "chats.jsonl", tmp_path / "made") == 0
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a text of some words\n" * 40)
    words = f"{tmp_path}/texts -o {tmp_path}/made --vocab-size 280 --workers 1 --quiet"
    assert script().main(words.split()) == 0
    assert not list(tmp_path.glob("made_mask.*"))
