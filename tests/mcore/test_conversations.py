"""Conversations become documents and masks, as Megatron's SFTTokenizer and SFTDataset say."""

import json
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers.text.libraries.sft_tokenizer import SFTTokenizer

from megatron_epp import safe_files
from megatron_epp.corpus.lengths import open_corpus
from tests.mcore.chats import CHATS, SCRIPT, prepare, turns, write_chats

FORMATS_THAT_MASK = ("nemotron-h-aligned", "nemotron-nano-v2")


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


def answers(chat: list[dict[str, str]]) -> list[str]:
    return [message["content"].strip() for message in chat if message["role"] == "assistant"]


def test_what_the_assistant_says_counts_and_nothing_else(folder: Path) -> None:
    tokenizer = SFTTokenizer(str(folder / "made.tokenizer"), "nemotron-h-aligned")
    found = targets_of(folder / "made", tokenizer)
    assert found == ["".join(f"{text}\n" for text in answers(chat)) for chat in CHATS]
    whole = tokenizer.ids_to_text(stored(folder / "made")[0])
    assert whole == (
        "<SPECIAL_10>System\nBe brief.\n<SPECIAL_11>User\nWhat is a token?\n"
        "<SPECIAL_11>Assistant\nA piece of text.\n"
    )


def test_the_assistants_prefix_is_no_target(folder: Path, tmp_path: Path) -> None:
    """Of a format that puts it into the assistant's turn: three tokens, whatever was trained."""
    chat_format, tokenizer_folder = "nemotron-nano-v2", folder / "made.tokenizer"
    tokenizer = SFTTokenizer(str(tokenizer_folder), chat_format)
    assert len(tokenizer.text_to_ids("<SPECIAL_11>Assistant\n")) == 3
    more = ("--chat-format", chat_format, "--tokenizer-model", tokenizer_folder)
    assert prepare(folder / "chats.jsonl", tmp_path / "nano", *more) == 0
    found = targets_of(tmp_path / "nano", tokenizer)
    expected = ["".join(f"{text}\n<SPECIAL_12>\n" for text in answers(chat)) for chat in CHATS]
    assert found == expected


@pytest.mark.parametrize("chat_format", [*FORMATS_THAT_MASK, "identity"])
def test_targets_are_those_of_megatrons_dataset(folder, tmp_path, chat_format, monkeypatch):
    """Of SFTDataset, on lines of one conversation; what it pads with, and the label in front of
    the padding, aside."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.datasets.utils import Split
    from megatron.core.tokenizers.utils.build_tokenizer import MegatronTokenizer
    from megatron.training.datasets.sft_dataset import SFTDataset

    path = str(folder / "made.tokenizer")
    tokenizer = MegatronTokenizer.from_pretrained(
        tokenizer_path=path, metadata_path={"library": "sft"}, prompt_format=chat_format
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
    more = ("--chat-format", chat_format, "--tokenizer-model", path)
    assert prepare(folder / "chats.jsonl", tmp_path / "ours", *more) == 0
    tokens, masks = stored(tmp_path / "ours"), stored(tmp_path / "ours_mask")
    for number, item in enumerate(theirs[number] for number in range(len(CHATS))):
        length = len(tokens[number])
        assert item["tokens"].tolist()[:length] == tokens[number]
        assert item["loss_mask"].tolist()[: length - 1] == masks[number][1:]
        assert not any(item["loss_mask"].tolist()[length - 1 :])


def test_a_line_of_several_conversations(folder: Path, tmp_path: Path) -> None:
    """Each begins with a message of the system; what comes before the first is one, too."""
    line = [*turns("a", "b", system=None), *turns("c", "d"), *turns("e", "f", "g", "h")]
    path = write_chats(tmp_path / "line.jsonl", [line])
    more = ("--tokenizer-model", folder / "made.tokenizer")
    assert prepare(path, tmp_path / "line", *more) == 0
    tokenizer = SFTTokenizer(str(folder / "made.tokenizer"), "nemotron-h-aligned")
    assert targets_of(tmp_path / "line", tokenizer) == ["b\n", "d\n", "f\nh\n"]


def test_planning_and_workers(folder: Path, tmp_path: Path) -> None:
    """Lengths end at the last answer; several processes write the same bytes."""
    chats = [*CHATS, turns("no answer"), turns("an answer", "yes", "and a question behind it")]
    path = write_chats(tmp_path / "more.jsonl", chats)
    more = ("--tokenizer-model", folder / "made.tokenizer")
    assert prepare(path, tmp_path / "one", *more) == 0
    corpus = open_corpus(str(tmp_path / "one.idx"))
    assert len(corpus) == len(chats) - 1
    assert corpus.counts.untargeted == 1
    masks = stored(tmp_path / "one_mask")
    needed = [max(at for at, counts in enumerate(mask) if counts) for mask in masks if any(mask)]
    assert list(corpus.in_order()) == needed
    assert needed[-1] < len(masks[-1]) - 1
    words = [SCRIPT, "--chat", path, "-o", tmp_path / "two", *more, "--workers", 2, "--quiet"]
    subprocess.run([sys.executable, *map(str, words)], check=True, capture_output=True)
    for suffix in (".bin", ".idx", "_mask.bin", "_mask.idx"):
        assert Path(f"{tmp_path}/one{suffix}").read_bytes() == (
            Path(f"{tmp_path}/two{suffix}").read_bytes()
        )


def weighing(chat: list[dict[str, str]], *weights: object) -> list[dict[str, object]]:
    """The conversation with a weight of each message, but where it is None."""
    pairs = zip(chat, weights, strict=True)
    return [{**one, **({} if weight is None else {"weight": weight})} for one, weight in pairs]


@pytest.mark.parametrize("chat_format", [*FORMATS_THAT_MASK, "identity"])
def test_a_message_of_weight_0_is_not_learnt(folder: Path, tmp_path: Path, chat_format) -> None:
    chat = turns("a", "first answer", "b", "second answer", "c", "third answer")
    weights = (None, None, 0, None, 1, None, 1)
    path = write_chats(tmp_path / "w.jsonl", [weighing(chat, *weights), chat])
    more = ("--chat-format", chat_format, "--tokenizer-model", folder / "made.tokenizer")
    assert prepare(path, tmp_path / "w", *more) == 0
    weighed, plain = stored(tmp_path / "w")
    assert weighed == plain, "what is read stays"
    tokenizer = SFTTokenizer(str(folder / "made.tokenizer"), chat_format)
    learnt, whole = targets_of(tmp_path / "w", tokenizer)
    assert "second" in learnt and "third" in learnt and "first" not in learnt
    end = {"nemotron-nano-v2": "\n<SPECIAL_12>\n", "nemotron-h-aligned": "\n", "identity": ""}
    assert whole.replace(f"first answer{end[chat_format]}", "") == learnt


def test_weights_that_are_none_and_keys_that_nothing_reads(folder, tmp_path, capsys) -> None:
    more = ("--tokenizer-model", folder / "made.tokenizer")
    for weight in (0.5, "1", -1, [0]):
        bad = write_chats(
            tmp_path / "bad.jsonl", [CHATS[0], weighing(turns("a", "b"), 1, 1, weight)]
        )
        assert prepare(bad, tmp_path / "bad", *more) == 2
        assert "bad.jsonl, line 2: message 2 has the weight" in capsys.readouterr().err
    lines = [{"messages": weighing(turns("a", "b"), 1, None, 1), "id": 7, "tools": []}]
    lines += [{"messages": [{**one, "name": "x"} for one in turns("c", "d")], "id": 8}]
    path = tmp_path / "keys.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert prepare(path, tmp_path / "keys", *more) == 0
    said = f"{path}: keys that are not read: 'id', 'name' of messages, 'tools'"
    assert [line for line in capsys.readouterr().err.splitlines() if "not read" in line] == [said]


# --- what can be wrong


ANSWERED = json.dumps({"messages": turns("a", "b")})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{not json", "not a line of JSON: Expecting property name"),
        ('{"text": "a document"}', 'no conversation; expected {"messages": [{"role"'),
        ('{"messages": []}', "no conversation"),
        ('{"messages": ["hello"]}', "message 0 has no text as its 'role'"),
        ('{"messages": [{"role": "user", "content": null}]}', "no text as its 'content'"),
        (json.dumps({"messages": turns("a")[1:] + turns("b", "c")[2:]}), None),
        (
            json.dumps({"messages": [{"role": "assistant", "content": "first"}]}),
            "message 0: the assistant speaks after no message",
        ),
        (
            json.dumps({"messages": [*turns("a", "b"), *turns("a", "b")[2:]]}),
            "message 3: the assistant speaks after assistant",
        ),
        (json.dumps({"messages": turns("a", "")}), "message 2: the assistant says nothing"),
        (
            json.dumps({"messages": [{"role": "narrator", "content": "once"}]}),
            "message 0: role 'narrator'; expected one of system, user, tool, assistant",
        ),
        ('{"messages": ' + "[" * 100_000, "not a line of JSON: "),
    ],
)
def test_a_line_that_is_no_conversation(folder, tmp_path, capsys, line, said) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{ANSWERED}\n\n{line}\n{ANSWERED}\n")
    more = ("--tokenizer-model", folder / "made.tokenizer")
    status = prepare(path, tmp_path / "made", *more)
    output = capsys.readouterr()
    if said is None:
        assert status == 0
        return
    assert status == 2
    assert output.err.startswith(f"prepare_corpus: {path}, line 3: ")
    assert said in output.err and output.err.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["chats.jsonl"]


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        ("", (), "holds no line"),
        (json.dumps({"messages": turns("a")}), (), "no token of its 1 lines is a target"),
        (ANSWERED, ("--tokenizer-model", "nowhere"), "nowhere: no such folder"),
        (ANSWERED, ("--chat-format", "default"), "give a --tokenizer-model that has a chat"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, capsys, text, more, said) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(text)
    assert prepare(path, tmp_path / "made", *more) == 2
    line = capsys.readouterr().err
    assert said in line and line.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["chats.jsonl"]
    assert prepare(tmp_path / "gone.jsonl", tmp_path / "made") == 2
    assert "gone.jsonl: no such file" in capsys.readouterr().err


def test_a_line_without_end_is_not_read_whole(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(safe_files, "MOST_TEXT_BYTES", 1 << 20)
    path = tmp_path / "chats.jsonl"
    path.write_bytes(f"{ANSWERED}\n".encode() + b"\0" * (3 << 20) + b"\n")
    said = f"prepare_corpus: {path}, line 2: longer than 1 MiB; expected a line of JSON for each"
    assert prepare(path, tmp_path / "made") == 2
    line = capsys.readouterr().err
    assert line.startswith(said) and line.count("\n") == 1
    from tests.mcore.chats import script

    words = f"{path} -o {tmp_path}/made --workers 1 --quiet"
    assert script().main(words.split()) == 2
    assert f"{path}, line 2: longer than 1 MiB" in capsys.readouterr().err


def test_a_tokenizer_that_refuses_a_turn_is_quoted_with_the_line(folder, tmp_path, capsys) -> None:
    """A folder without a chat template, in the format that asks for one."""
    path = write_chats(tmp_path / "chats.jsonl")
    more = ("--tokenizer-model", folder / "made.tokenizer", "--chat-format", "default")
    assert prepare(path, tmp_path / "made", *more) == 2
    line = capsys.readouterr().err
    assert f"{path}, line 1: SFTTokenizer refuses it in the format default: " in line
    assert line.count("\n") == 1


def test_text_takes_the_place_of_chats(folder: Path, tmp_path: Path) -> None:
    """Masks that stood under the name go with the conversations they belonged to."""
    from tests.mcore.chats import script

    assert prepare(folder / "chats.jsonl", tmp_path / "made") == 0
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a text of some words\n" * 40)
    words = f"{tmp_path}/texts -o {tmp_path}/made --vocab-size 280 --workers 1 --quiet"
    assert script().main(words.split()) == 0
    assert not list(tmp_path.glob("made_mask.*"))
