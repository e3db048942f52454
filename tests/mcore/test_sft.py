"""Chats through the trainer: ``--sft`` as it is given, its corpus, and documents from Python."""

import pickle
from itertools import chain
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_epp.control.step_source import planned_documents
from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.corpus.shared_prefixes import PrefixForest
from megatron_epp.mcore.choose.choices import first_batches
from megatron_epp.mcore.data.chat_cache import ChatFile, check_chat_flags, first_documents
from tests.mcore.chats import CHATS, prepare, script, turns, write_chats
from tests.mcore.models import TRAINED_SSM
from tests.mcore.resumes import STOCK, STOCK_ON_CONVERSATIONS, require_same_numbers
from tests.mcore.runs import PROGRAM, Run, flags, train, trained, write_corpus

HYBRID = ("-m", "megatron_epp.pretrain_hybrid")
OWN_ENTRY = (str(Path(__file__).with_name("own_entry.py")),)
# Every iteration trains on all of them, so that orders do not matter.
BATCH = {"global_batch_size": len(CHATS), "seq_length": 128, "vocab_size": None}


MODELS = [
    pytest.param({}, id="a GPTModel"),
    pytest.param(TRAINED_SSM, id="a HybridModel", marks=pytest.mark.everything),
]


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    """chats.jsonl, and the folder of its tokenizer beside it."""
    folder = tmp_path_factory.mktemp("chats")
    path = write_chats(folder / "chats.jsonl")
    assert prepare(path, folder / "made") == 0
    return path


def chat_flags(path: Path, **changes: object) -> list[str]:
    tokenizer = {
        "tokenizer_type": "SFTTokenizer",
        "tokenizer_model": path.parent / "made.tokenizer",
    }
    return flags(path, **BATCH | tokenizer | {"epp": True} | changes)


@pytest.fixture(scope="module", params=MODELS)
def model(request) -> dict[str, object]:
    return request.param


@pytest.fixture(scope="module")
def elastic(chats: Path, model) -> Run:
    """Three iterations over two stages, straight from the file of chats."""
    cache = chats.parent / f"cached {len(model)}"
    words = chat_flags(chats, sft=True, data_cache_path=cache, **model)
    run = trained(words, program=HYBRID if model else PROGRAM)
    assert "6 conversations of 6 lines" in run.output
    return run


def test_megatrons_own_sft_data_and_schedule_give_the_same_numbers(chats, model, elastic) -> None:
    stock = trained(
        chat_flags(chats, epp=None, epp_cost_model=None, **STOCK, **model),
        program=STOCK_ON_CONVERSATIONS,
    )
    require_same_numbers(elastic, stock, 3)


@pytest.fixture(scope="module")
def masked(chats: Path, model, elastic) -> str:
    """The corpus that the first run has made."""
    (mask,) = chats.parent.glob(f"cached {len(model)}/*_mask.idx")
    return str(mask).removesuffix("_mask.idx")


def test_a_masked_corpus_trains_as_its_chats_wherever_words_lie(
    chats, masked, model, elastic
) -> None:
    words = chat_flags(chats, **{"data_path": masked, "epp_vocab_parallel": "on"} | model)
    run = trained(words, program=HYBRID if model else PROGRAM)
    require_same_numbers(run, elastic, 3)


def test_documents_from_python_train_as_the_file_of_chats(
    chats, masked, model, elastic, tmp_path, monkeypatch
) -> None:
    """Tokens and masks of that corpus as items of Python, through an entry script of one's own."""
    columns = (IndexedDataset(masked), IndexedDataset(f"{masked}_mask"))
    documents = [tuple(column[i].tolist() for column in columns) for i in range(len(CHATS))]
    (tmp_path / "items").write_bytes(pickle.dumps(documents))
    monkeypatch.setenv("ITEMS", str(tmp_path / "items"))
    words = chat_flags(chats, data_path=None, epp_placement=None, **model)
    items = trained(words, program=OWN_ENTRY)
    assert "--epp-placement auto: one stage a rank; a script of your own" in items.output
    require_same_numbers(items, elastic, 3)


def test_first_chats_have_the_lengths_of_their_corpus(chats, masked, parse) -> None:
    """So that placement is chosen before the file is converted."""
    tokenizer = f"--tokenizer-model={chats.parent / 'made.tokenizer'}"
    words = ["--sft", "--tokenizer-type=SFTTokenizer", tokenizer, f"--data-path={chats}"]
    words += ["--epp-overlong=truncate", "--epp-blend=tokens", "--seq-length=128"]
    args, of_corpus = parse(*words), parse(*words)
    for each in (args, of_corpus):
        each.global_batch_size, each.mock_data = len(CHATS) // 2, False
        each.epp_share_from = 2
    of_corpus.sft, of_corpus.data_path = False, [str(masked)]
    inputs = open_corpus(f"{masked}.idx", 128, "truncate").inputs.tolist()
    assert sorted(chain(*first_batches(args))) == sorted(inputs)
    shared, expected = (
        [planned_documents(batch) for batch in first_batches(each)] for each in (args, of_corpus)
    )
    assert shared == expected and all(isinstance(forest, PrefixForest) for forest in shared)
    whole = open_corpus(f"{masked}.idx", 0, "truncate").inputs
    first = first_documents(ChatFile(str(chats), args), 2)
    assert [len(tokens) - 1 for tokens in first] == whole[:2].tolist()


def test_a_chat_that_does_not_parse_ends_every_rank_with_its_line(chats, tmp_path) -> None:
    path = write_chats(tmp_path / "bad.jsonl", [*CHATS, turns("a", "b")])
    path.write_text(path.read_text() + '{"messages": 3}\n')
    (tmp_path / "made.tokenizer").symlink_to(chats.parent / "made.tokenizer")
    run = train(chat_flags(path, sft=True, data_cache_path=tmp_path / "cached"))
    assert run.statuses == (2, 2), run.output
    (line,) = run.errors
    assert f"{path}, line 8: no conversation; expected" in line
    assert list((tmp_path / "cached").iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer_type": "NullTokenizer"}, "--sft needs --tokenizer-type SFTTokenizer"),
        ({"tokenizer_model": None}, "and --tokenizer-model FOLDER"),
        (
            {"tokenizer_model": "/nowhere/at/all"},
            "--tokenizer-model /nowhere/at/all: no such folder",
        ),
        ({"sft_tokenizer_prompt_format": "mine"}, "-format mine: expected one of nemotron-nano-v2"),
        ({"data_path": None}, "no chats to train on: give --data-path"),
        ({"data_path": ["3", "gone.jsonl"]}, "gone.jsonl: no such file; --sft expects a .jsonl"),
        ({"data_path": ["{folder}/made"]}, "leave --sft out: it is a corpus already"),
    ],
)
def test_flags_of_chats_are_looked_at_first(chats, changes, said, parse) -> None:
    words = "--tokenizer-type SFTTokenizer --sft-tokenizer-prompt-format identity"
    model = chats.parent / "made.tokenizer"
    args = parse(*words.split(), f"--tokenizer-model={model}", f"--data-path={chats}")
    check_chat_flags(args)
    vars(args).update(changes)
    if args.data_path:
        args.data_path = [word.format(folder=chats.parent) for word in args.data_path]
    with pytest.raises(ValueError) as refusal:
        check_chat_flags(args)
    assert said in str(refusal.value)


def test_a_batch_without_any_target_has_no_loss_and_no_gradient(chats, tmp_path) -> None:
    """Through --eod-mask-loss, which takes away the targets that the masks left."""
    eod = script().CHAT_TOKENS.index("</s>")
    corpus = write_corpus(tmp_path / "blank", [9, 4, 30, 2, 65, 7], documents_of=eod)
    words = chat_flags(
        chats, data_path=corpus, pipeline_model_parallel_size=1, eod_mask_loss=True, train_iters=2
    )
    run = trained(words, processes=1)
    assert run.losses == [0.0, 0.0]
    assert run.grad_norms == [0.0, 0.0]
    assert "number of nan iterations:   0" in run.output
