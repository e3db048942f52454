"""Documents come whole, through Megatron's builder, in an order that (seed, sample) gives."""

import gc
import itertools
import os
import re
import resource
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from megatron.core import num_microbatches_calculator
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    _get_ltor_masks_and_position_ids,
)

from megatron_epp.corpus import epochs, idx_file, loss_mask
from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.mcore.data.documents import DocumentConfig, check_corpora, config_from_args
from megatron_epp.mcore.data.global_batches import (
    Documents,
    GlobalBatches,
    ScheduledSizes,
    build_documents,
)
from megatron_epp.mcore.data.item_documents import ItemDocuments
from tests.mcore.runs import write_documents
from tests.runtime.world import run

EOD, PAD, VOCABULARY = 3, 0, 100


class Tokenizer:
    """What Megatron's datasets ask of a tokenizer."""

    eod, eos, pad, vocab_size = EOD, EOD, PAD, VOCABULARY
    unique_identifiers = {"class": "test"}  # noqa: RUF012  Megatron reads it, nobody writes it


SETTINGS = {
    "random_seed": 7,
    "split": "1,0,0",
    "tokenizer": Tokenizer(),
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "eod_mask_loss": False,
}


def numbered(lengths: list[int]) -> list[list[int]]:
    """Documents of these many tokens: 10, 11, ... 89, 10, ... counted on through the corpus."""
    first = numpy.cumsum([0, *lengths])
    return [list(10 + numpy.arange(a, b) % 80) for a, b in itertools.pairwise(first)]


def corpus_of(
    prefix: Path, documents: list[list[int]], masks: list[list[int]] | None = None, **how: object
) -> str:
    """A corpus, and the masks next to it."""
    if masks is not None:
        write_documents(Path(f"{prefix}_mask"), masks, dtype=numpy.uint8)
    return str(write_documents(prefix, documents, **how))


def configure(prefixes: list[str], weights: list[float] | None = None, **changes) -> DocumentConfig:
    return DocumentConfig(
        **SETTINGS | {"sequence_length": 8, "blend": (prefixes, weights)} | changes
    )


def train(config: DocumentConfig, size: int | None) -> Documents:
    documents = build_documents(config, [size, 0, 0])[0]
    assert isinstance(documents, Documents)
    return documents


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Documents]:
    """The training documents of one corpus."""

    def make(texts: list[list[int]], size: int | None = None, masks=None, **changes) -> Documents:
        return train(configure([corpus_of(tmp_path / "a", texts, masks)], **changes), size)

    return make


# --- one corpus


LENGTHS = [5, 12, 3, 2, 1]
MASKS = [[0, 0, 1, 1, 0], [0, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0], [0, 0, 0], [1, 1], [1]]


@pytest.mark.parametrize(
    ("masks", "overlong", "expected"),
    [
        (None, "truncate", [(0, 0, 4), (1, 0, 4), (2, 0, 2), (3, 0, 1)]),
        (None, "drop", [(0, 0, 4), (2, 0, 2), (3, 0, 1)]),
        (None, "split", [(0, 0, 4), (1, 0, 4), (1, 4, 4), (1, 8, 3), (2, 0, 2), (3, 0, 1)]),
        # Nothing lies behind the last target.
        (MASKS, "truncate", [(0, 0, 3), (1, 0, 3), (3, 0, 1)]),
        (MASKS, "drop", [(0, 0, 3), (3, 0, 1)]),
        (MASKS, "split", [(0, 0, 3), (1, 0, 3), (1, 4, 4), (3, 0, 1)]),
    ],
)
@pytest.mark.parametrize("mapped", [True, False])
def test_documents_are_texts_with_the_next_token_as_target(
    tmp_path: Path, masks, overlong: str, expected: list[tuple[int, int, int]], mapped: bool
) -> None:
    """``expected``: text, start and inputs of each; planning from the index draws the same."""
    texts = numbered(LENGTHS)
    corpus = corpus_of(tmp_path / "a", texts, masks, dtype=numpy.uint16)
    how = {"sequence_length": 4, "overlong": overlong, "mmap_bin_files": mapped}
    documents = train(configure([corpus], **how), None)
    found, first = [], numpy.cumsum([0, *LENGTHS])
    for sample in range(len(documents)):
        tokens = documents.tokens(sample)
        assert tokens.dtype == numpy.int64
        (length,) = documents.lengths([sample]).tolist()
        text = int(numpy.searchsorted(first, tokens[0] - 10, side="right")) - 1
        start = int(tokens[0] - 10 - first[text])
        found.append((text, start, length))
        rows = slice(start + 1, start + length + 1)
        mask = ([1] * LENGTHS[text] if masks is None else masks[text])[rows]
        assert tokens.tolist() == texts[text][start : start + length + 1] and mask[-1] == 1
        for cut in range(length):  # a span reads what the whole holds
            assert documents.inputs(sample, cut, length).tolist() == tokens[cut:-1].tolist()
            labels, weights = documents.targets(sample, cut, length)
            assert labels.tolist() == tokens[cut + 1 :].tolist()
            assert weights.dtype == numpy.float32 and weights.tolist() == mask[cut:]
        item = {name: row.tolist() for name, row in documents.dataset[sample].items()}
        assert (item["tokens"], item["labels"]) == (tokens[:-1].tolist(), tokens[1:].tolist())
        assert item["loss_mask"] == mask and item["position_ids"] == list(range(length))
    assert sorted(found) == expected
    planned = open_corpus(f"{corpus}.idx", context=4, overlong=overlong)
    assert sorted(planned.in_order()) == sorted(length for _, _, length in expected)
    batches = GlobalBatches(train(configure([corpus], **how), 20), 5, 0)  # several epochs
    for number in range(4):
        assert planned.batch(number, 5, seed=7) == tuple(next(batches).lengths)


def test_a_span_is_all_that_is_read(made) -> None:
    """A stage that works on a slice must not fetch the document."""
    documents = made(numbered([40]))
    low_level = documents.parts[0].dataset
    asked = []

    class Counting:
        def get(self, idx: int, offset: int, length: int) -> numpy.ndarray:
            asked.append((offset, length))
            return low_level.get(idx, offset, length)

    documents.parts[0].dataset = Counting()
    documents.inputs(0, 2, 4)
    documents.targets(0, 2, 4)
    documents.lengths(range(1))
    assert documents.tokens(0, 7, 7).size == 0
    assert asked == [(2, 2), (2, 3)]
    with pytest.raises(ValueError, match=r"tokens \[0:12\] of item \d, which has 9 tokens"):
        documents.tokens(0, 0, 12)


@pytest.mark.parametrize("masked", [False, True])
def test_loss_mask_is_megatrons(made, masked: bool) -> None:
    """The last EOD is a target; only what follows an EOD is masked; masks come on top."""
    text, mask = [20, EOD, 21, 22, PAD, EOD, 23, EOD], [1, 1, 1, 0, 1, 1, 1, 1]
    _, expected, _ = _get_ltor_masks_and_position_ids(
        torch.tensor(text[:-1]), EOD, False, False, masked, False
    )
    expected[torch.tensor(text[1:]) == PAD] = 0.0  # as GPTDataset.__getitem__ does
    for masks in (None, [mask]):
        documents = made([text], masks=masks, eod_mask_loss=masked)
        found = documents.targets(0, 0, 7)[1].tolist()
        ours = [1] * 7 if masks is None else mask[1:]
        assert found == [a * b for a, b in zip(expected.tolist(), ours, strict=True)]
        assert documents.dataset[0]["loss_mask"].tolist() == found
    assert expected.tolist() == [1, 1 - masked, 1, 0, 1, 1 - masked, 1]


# --- blends and splits


def test_blend_by_documents_draws_as_megatron_does(tmp_path: Path) -> None:
    """Of two corpora, one of which has masks."""
    prefixes = [
        corpus_of(tmp_path / "a", numbered([3] * 6), [[0, 0, 1]] * 6),
        corpus_of(tmp_path / "b", numbered([6] * 5)),
    ]
    changes = {"blend_by": "documents", "path_to_cache": str(tmp_path / "cache")}
    config = configure(prefixes, [0.25, 0.75], **changes)
    documents = train(config, 40)
    assert isinstance(documents.dataset, BlendedDataset)
    corpora, items = documents.locate(range(len(documents)))
    lengths = documents.lengths(range(len(documents)))
    assert numpy.bincount(corpora).tolist() == [10, 30]
    for sample in range(len(documents)):
        item = documents.dataset[sample]
        assert item["dataset_id"] == corpora[sample]
        assert documents.tokens(sample)[:-1].tolist() == item["tokens"].tolist()
        assert item["loss_mask"].tolist() == ([1] * 5 if corpora[sample] else [0, 1])
        assert lengths[sample] == len(item["tokens"])
        assert documents.parts[corpora[sample]].length(items[sample]) == lengths[sample]
    assert documents.counts.documents == 11
    # A second start finds the blend in the cache and is the same.
    assert list((tmp_path / "cache").glob("*-BlendedDataset-train-dataset_index.npy"))
    again = train(config, 40)
    assert again.lengths(range(40)).tolist() == lengths.tolist()


@pytest.mark.parametrize(
    ("means", "weights", "points"),
    [
        ((20, 120), (0.5, 0.5), 1.0),
        ((20, 120), (0.9, 0.1), 1.0),
        ((20, 120, 900), (0.5, 0.3, 0.2), 2.0),
    ],
)
def test_a_blends_tokens_are_those_of_megatrons_own_samples(
    tmp_path: Path, means: tuple[int, ...], weights: tuple[float, ...], points: float
) -> None:
    """In training, at resume and in validation; documents longer than the context are cut."""
    random, prefixes = numpy.random.RandomState(0), []
    for number, mean in enumerate(means):
        lengths = numpy.maximum(2, random.lognormal(numpy.log(mean) - 0.5, 1, 3000).astype(int))
        documents = [[10 + number] * length for length in lengths]
        prefixes.append(corpus_of(tmp_path / str(number), documents, dtype=numpy.uint8))
    common = {"split": "60,40,0", "sequence_length": 1000}
    of_stock = GPTDatasetConfig(
        **SETTINGS | common, blend=(prefixes, [*weights]), path_to_cache=str(tmp_path / "cache")
    )
    sizes = [300, 300, 0]
    stock = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, of_stock).build()
    ours = build_documents(configure(prefixes, [*weights], **common), [20_000, 20_000, 0])
    for theirs, documents in zip(stock[:2], ours[:2], strict=True):
        text = numpy.concatenate([theirs[n]["tokens"].numpy() for n in range(300)])
        expected = numpy.bincount(text - 10, minlength=len(means)) / len(text)
        batches, drawn, corpora = GlobalBatches(documents, 2000, 0), [], []
        for _ in range(10):
            batch = next(batches)  # as a run that resumes there begins
            again = next(GlobalBatches(documents, 2000, int(batch.samples[0])))
            assert again.lengths.tolist() == batch.lengths.tolist()
            drawn.append(batch.lengths)
            corpora.append([documents.tokens(int(s), 0, 1)[0] - 10 for s in batch.samples])
        tokens, of = numpy.concatenate(drawn), numpy.concatenate(corpora)
        sums = numpy.stack([numpy.cumsum(tokens * (of == n)) for n in range(len(means))])
        shares = 100 * sums / sums.sum(0)
        assert numpy.abs(shares[:, -1] - 100 * expected).max() < points
        assert numpy.abs(shares[:, 2000:] - 100 * expected[:, None]).max() < 5
        assert numpy.abs(shares[:, -1] - 100 * numpy.array(weights) / sum(weights)).max() < 0.5
        for weight, prefix in zip(weights, prefixes, strict=True):
            share = 100 * weight / sum(weights)
            assert f"{share:.1f}% of the tokens from {prefix}" in documents.fractions


@pytest.mark.parametrize("weights", [None, [0.3, 0.7]])
def test_a_start_costs_the_same_for_any_number_of_iterations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: list[float] | None
) -> None:
    """Permutations drawn and bytes held, with the lines of the start, the first batches, and the
    first ones of a run that resumes late; of training and validation."""
    drawn: list[tuple[int, int]] = []
    epoch_order = epochs.epoch_order

    def counted(documents: int, seed: int, epoch: int) -> numpy.ndarray:
        drawn.append((documents, epoch))
        return epoch_order(documents, seed, epoch)

    monkeypatch.setattr(epochs, "epoch_order", counted)
    random = numpy.random.RandomState(0)
    texts = [numbered(random.randint(2, 40, 500 * n).tolist()) for n in (1, 4)]
    prefixes = [corpus_of(tmp_path / str(n), one) for n, one in enumerate(texts)]
    prefixes = prefixes if weights else prefixes[:1]
    costs: dict[int, tuple[int, int]] = {}
    for iterations in (20, 20, 200_000):  # the first one imports what it needs
        drawn.clear()
        tracemalloc.start()
        size = 256 * iterations
        built = build_documents(configure(prefixes, weights, split="50,50,0"), [size, size, 0])
        for documents in filter(None, built):
            assert documents.mean_length > 1 and len(documents) == size
            next(GlobalBatches(documents, 256, 0))
        costs[iterations] = len(drawn), tracemalloc.get_traced_memory()[0]
        late = [GlobalBatches(one, 256, size - 256) for one in built if one is not None]
        for batches in late:
            next(batches)
        assert len(drawn) < 40 * len(prefixes), "a late start draws the epochs around it"
        tracemalloc.stop()
    assert costs[20][0] == costs[200_000][0] > 0
    assert costs[200_000][1] == pytest.approx(costs[20][1], rel=0.02)


def test_splits_share_no_document_and_are_indexed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check at the start and the data sets are given one index."""
    calls, apply_context = [], loss_mask.apply_context

    def counted(inputs: numpy.ndarray, *others):
        calls.append(len(inputs))
        return apply_context(inputs, *others)

    monkeypatch.setattr(loss_mask, "apply_context", counted)
    corpus = corpus_of(tmp_path / "a", [[10 + n, 11] for n in range(50)])
    parts = build_documents(configure([corpus], split="80,10,10"), [None, None, None])
    assert calls == [40, 5, 5]
    firsts = [
        {int(documents.tokens(sample)[0]) for sample in range(len(documents))}
        for documents in parts
    ]
    assert [len(part) for part in firsts] == [40, 5, 5]
    assert set.union(*firsts) == set(range(10, 60))
    # Or each split has corpora of its own.
    one, two = (corpus_of(tmp_path / name, [[n, 21]]) for name, n in (("one", 20), ("two", 30)))
    own = [([one], None), ([two], None), None]
    config = configure([], blend=None, split=None, blend_per_split=own)
    training, validation, test = build_documents(config, [4, 2, 0])
    assert (training.tokens(3).tolist(), validation.tokens(1).tolist()) == ([20, 21], [30, 21])
    assert test is None


def test_megatrons_flags_become_the_configuration(tmp_path: Path, parse) -> None:
    corpus = corpus_of(tmp_path / "a", numbered([5, 9]))
    words = "--seed 1 --seq-length 4 --split 100,0,0 --no-mmap-bin-files --eod-mask-loss"
    flags = parse(*words.split(), "--data-path", corpus)
    config = config_from_args(flags, Tokenizer(), "drop", VOCABULARY)
    documents = train(config, 3)
    assert documents.lengths(range(3)).tolist() == [4, 4, 4]
    assert documents.counts.dropped == 1
    # Chat files are read as the corpora they were converted to; weights and splits stay theirs.
    flags.data_path, chats = ["3", "x.jsonl", "1", corpus], {"x.jsonl": "cache/x"}
    config = config_from_args(flags, Tokenizer(), "drop", VOCABULARY, chats)
    assert config.blend == (["cache/x", corpus], [3.0, 1.0])
    flags.data_path, flags.train_data_path, flags.valid_data_path = None, ["x.jsonl"], [corpus]
    flags.split = None
    config = config_from_args(flags, Tokenizer(), "drop", VOCABULARY, chats)
    assert config.blend_per_split == [(["cache/x"], None), ([corpus], None), None]
    flags.train_data_path = flags.valid_data_path = None
    with pytest.raises(ValueError, match="no documents to train on: give --data-path"):
        config_from_args(flags, Tokenizer(), "drop", VOCABULARY)
    flags.dataloader_fast_cache_load = True
    with pytest.raises(ValueError, match="--dataloader-fast-cache-load skips the reading"):
        config_from_args(flags, Tokenizer(), "drop", VOCABULARY)


# --- documents from Python


class Listed:
    """Items as of a variable-length dataset: two rows of padding behind each."""

    def __init__(self, lengths: list[int], **changes: object):
        self.original_seq_lens, self.changes, self.read = lengths, changes, 0

    def __len__(self) -> int:
        return len(self.original_seq_lens)

    def __getitem__(self, index: int) -> dict[str, object]:
        self.read += 1
        length = self.original_seq_lens[index]
        tokens = torch.arange(length + 3) % 90 + 10 * index
        mask = torch.arange(length + 2) % 3 != 0
        item = {
            "tokens": tokens[:-1],
            "labels": torch.where(mask, tokens[1:], -100),
            "loss_mask": mask.float(),
            "original_seq_len": torch.tensor([length]),
        }
        return {key: value for key, value in {**item, **self.changes}.items() if value is not None}


def from_items(items: Listed, overlong: str = "truncate", wanted: int | None = None):
    return ItemDocuments(items, 8, overlong, wanted, 200)


@pytest.mark.parametrize(
    ("overlong", "expected"),
    [
        ("truncate", [(0, 0, 5), (2, 0, 8), (3, 0, 2)]),
        ("drop", [(0, 0, 5), (3, 0, 2)]),
        ("split", [(0, 0, 5), (2, 0, 8), (2, 8, 8), (2, 16, 4), (3, 0, 2)]),
    ],
)
def test_items_are_documents_in_their_order(overlong, expected) -> None:
    items = Listed([5, 0, 20, 2])
    documents = from_items(items, overlong, wanted=7)
    batches = GlobalBatches(documents, 7, 0)
    lengths = [inputs for _, _, inputs in expected]
    assert next(batches).lengths.tolist() == list(itertools.islice(itertools.cycle(lengths), 7))
    assert items.read == 0, "lengths are known ahead"
    assert batches.peek() is None and len(documents) == 7
    for sample in range(7):
        item, start, length = expected[sample % len(expected)]
        whole = Listed([5, 0, 20, 2])[item]
        rows = slice(start, start + length)
        assert documents.inputs(sample, 0, length).tolist() == whole["tokens"][rows].tolist()
        labels, mask = documents.targets(sample, 0, length)
        assert mask.tolist() == whole["loss_mask"][rows].tolist()
        assert labels[mask == 1].tolist() == whole["labels"][rows][mask == 1].tolist()
        assert labels.min() >= 0
    assert items.read <= len(items), "a document's slices read it once"


@pytest.mark.parametrize(
    ("lengths", "changes", "said"),
    [
        ([5], {"original_seq_len": 4}, "original_seq_len [4], but original_seq_lens said 5"),
        ([5], {"tokens": torch.arange(3)}, "{'tokens': 3} rows; expected the 5"),
        ([5], {"labels": None}, "has no 'labels'; expected tokens, labels, loss_mask and"),
        ([5], {"loss_mask": torch.full((9,), 0.5)}, "loss_mask holds other numbers than 0 and 1"),
        ([5], {"tokens": torch.full((9,), 200)}, "holds token 200, but the vocabulary has 200"),
        ([[1, 2], [3, 4]], {}, "int64 of shape (2, 2); expected 2 whole numbers"),
        ([1.5, 2.0], {}, "float64 of shape (2,); expected 2 whole numbers"),
        ([5, -1], {}, "from -1 to 5; expected from 0 to"),
        ([0, 0], {}, "no usable document"),
    ],
)
def test_items_that_lie_are_named(lengths, changes, said) -> None:
    expected = rf"^item 0 of Listed: {re.escape(said)}" if changes else re.escape(said)
    with pytest.raises(ValueError, match=expected):
        from_items(Listed(lengths, **changes)).targets(0, 0, 5)


# --- batches


@pytest.mark.parametrize(
    ("schedule", "starts", "total"),
    [(None, [*range(0, 40, 4)], 40), ("0:2 4:3 10:6", [0, 2, 4, 7, 10, 16], 22)],
)
def test_batches_are_of_the_size_that_megatron_says_and_resume_anywhere(
    made, schedule: str | None, starts: list[int], total: int
) -> None:
    """Every batch is what a run that resumes there draws, and what was seen of it ahead."""
    sizes = 4
    if schedule:
        num_microbatches_calculator.init_num_microbatches_calculator(
            0, None, None, 1, 1, step_batch_size_schedule=schedule
        )
    try:
        if schedule:
            sizes = ScheduledSizes()
            assert sizes.samples(len(starts)) == total
            assert sizes.samples(10**15) == 10 + 6 * (10**15 - 4), "not one by one"
        documents = made(numbered([2 + n % 9 for n in range(11)]), total)
        running = GlobalBatches(documents, sizes, 0)
        for consumed, stop in itertools.pairwise([*starts, total]):
            ahead, resumed = running.peek(1), next(GlobalBatches(documents, sizes, consumed))
            batch = next(running)
            assert batch.samples.tolist() == resumed.samples.tolist() == [*range(consumed, stop)]
            assert batch.lengths.tolist() == resumed.lengths.tolist()
            following = running.peek()
            assert (ahead is None) == (following is None) == (consumed == starts[-1])
            if ahead is not None:
                assert ahead.samples.tolist() == following.samples.tolist()
                assert ahead.lengths.tolist() == following.lengths.tolist()
        with pytest.raises(ValueError, match=f"the data set ends after {total} documents"):
            next(running)
        if schedule:  # Megatron's own was asked for nothing.
            assert num_microbatches_calculator.get_current_global_batch_size() == 2
    finally:
        num_microbatches_calculator.unset_num_microbatches_calculator()


def test_a_corpus_without_weights_lasts_one_epoch(tmp_path: Path) -> None:
    """Megatron mixes such corpora as they are; the end is said, not met as StopIteration."""
    prefixes = [corpus_of(tmp_path / n, numbered([4] * 3)) for n in "ab"]
    batches = GlobalBatches(train(configure(prefixes), 100), 4, 0)
    next(batches)
    with pytest.raises(ValueError, match=r"the data set ends after 6 documents.* without weights"):
        next(batches)


# --- what can be wrong


TOO_LONG = [[10], [11], [12] * 30]
TWICE, HALF = [[9, 9]] * 10, [[0, 1]] * 8 + [[0, 0]] * 2


@pytest.mark.parametrize(
    ("name", "texts", "masks", "changes", "sizes", "said"),
    [
        ("gone", None, None, {}, (1, 0, 0), r"gone\.idx: no such file; expected the index"),
        ("a.bin", [[10, 11]], None, {}, (1, 0, 0), "/a, without the suffix"),
        ("x.jsonl", None, None, {}, (1, 0, 0), r"x\.jsonl: no corpus; .* give --sft as well"),
        ("half", [[10, 11]], None, {}, (1, 0, 0), r"half\.bin: no such file; expected the tokens"),
        (
            "a",
            TOO_LONG,
            None,
            {"overlong": "drop"},
            (10, 0, 0),
            r"a: no usable document for train: 3 sequences fall to it, 2 have fewer than 2 tokens, "
            r"1 are dropped for exceeding 8 tokens; .* truncate or split",
        ),
        ("a", TOO_LONG, None, {"split": "98,1,1"}, (10, 0, 2), "for test: 0 sequences fall to it"),
        ("a", TOO_LONG, None, {"split": "98,1,1"}, (10, 0, 0), None),  # nothing is wanted of it
        ("a", [[], []], None, {}, (10, 0, 0), "none of its 2 sequences holds a token"),
        ("a", [[9] * 5], [[0, 1]], {}, (1, 0, 0), r"_mask\.idx: the mask of sequence 0 has 2 ent"),
        # A split reads its own masks.
        ("a", TWICE, HALF, {"split": "80,20,0"}, (9, 0, 0), None),
        ("a", TWICE, HALF, {"split": "80,20,0"}, (1, 2, 0), "valid: 2 sequences fall to it, 2 hav"),
    ],
)
def test_a_corpus_that_cannot_be_trained_on_is_refused_at_start(
    tmp_path: Path, name, texts, masks, changes, sizes, said
) -> None:
    if texts is not None:
        corpus_of(tmp_path / name.removesuffix(".bin"), texts, masks)
        if name == "half":
            (tmp_path / "half.bin").unlink()
    config = configure([str(tmp_path / name)], **changes)
    if said is None:
        return check_corpora(config, sizes)
    with pytest.raises(ValueError, match=said):
        check_corpora(config, sizes)
    with pytest.raises(ValueError, match=said):
        build_documents(config, [*sizes])


@pytest.mark.parametrize("dtype", [numpy.uint16, numpy.int32])
def test_the_scan_is_exact_where_it_covers_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: type
) -> None:
    """A large corpus is only sampled at the start: reading is the second line."""
    monkeypatch.setattr(idx_file, "BLOCK_BYTES", 8)  # blocks of few tokens, the last one short
    for wrong in range(7):
        tokens = [10] * 7
        tokens[wrong] = 99
        prefix = corpus_of(tmp_path / str(wrong), [tokens], dtype=dtype)
        check_corpora(configure([prefix], vocabulary_size=100), [1, 0, 0])
        with pytest.raises(ValueError, match=r"\.bin: holds token 99, but the vocabulary has 99"):
            check_corpora(configure([prefix], vocabulary_size=99), [1, 0, 0])
    monkeypatch.setattr(idx_file, "SCAN_BYTES", 16)  # first and last block only
    missed = corpus_of(tmp_path / "missed", [[10, 11] * 2, [99, 11], [10, 11] * 2], dtype=dtype)
    documents = train(configure([missed], vocabulary_size=99), None)
    with pytest.raises(ValueError, match="holds token 99"):
        for sample in range(3):
            documents.tokens(sample)


def test_sentence_split_corpus_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = corpus_of(tmp_path / "a", numbered([20, 20]), sentences=4)
    documents = train(configure([prefix], split="50,25,25"), None)
    assert documents.lengths(range(4)).tolist() == [4] * 4
    (line,) = [record.message for record in caplog.records if "sentences" in record.message]
    assert "8 sequences in 2 documents" in line


def test_the_limit_of_open_files_is_raised_as_far_as_corpora_need(tmp_path, monkeypatch) -> None:
    """Of data and masks, in three splits; or one line says both numbers."""
    text, mask = [[10, 11, 12]] * 9, [[1, 1, 1]] * 9
    prefixes = [corpus_of(tmp_path / str(n), text, mask if n % 2 else None) for n in range(40)]
    config, sizes = configure(prefixes, [1.0] * 40, split="40,30,30"), [50, 50, 50]
    before, limits = len(os.listdir("/dev/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)
    files = 3 * (40 + 3 * 20)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + files // 2, limits[1]))
        built = build_documents(config, sizes)
        assert len(os.listdir("/dev/fd")) == before + files
        assert built[2].tokens(0).tolist() == [10, 11, 12]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft >= before + files and hard == limits[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (100, 256))
    needed = files + len(os.listdir("/dev/fd"))
    said = rf"^40 corpora need {needed} open files in each process; the hard limit is 256 \(ulimit"
    with pytest.raises(ValueError, match=said):
        check_corpora(config, sizes)
    del built
    gc.collect()
    few = configure(prefixes[:2], [1.0, 1.0])
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: both[0] == 256 or 1 / 0)
    check_corpora(few, [5, 0, 0])


# --- several nodes


def other_documents(rank: int, folder: Path) -> dict[str, str]:
    """What a rank hears that has files of its own below ``folder / rank``."""
    os.chdir(folder / str(rank))

    def told(prefix: str, **changes: object) -> str:
        config = configure([prefix], **changes)
        try:
            documents = build_documents(config, [None, 0, 0], torch.distributed.group.WORLD)[0]
        except ValueError as error:
            return str(error)
        return f"{len(documents)} documents"

    return {
        "equal": told("equal"),
        "longer": told("longer"),
        "beyond the context": told("longer", sequence_length=4),
        "another": told("another" if rank else "equal"),
    }


@pytest.mark.everything
def test_nodes_with_other_documents_are_told_at_start(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
        for name, second in (("equal", 9), ("another", 9), ("longer", 9 - (rank == 2))):
            corpus_of(tmp_path / str(rank) / name, numbered([5, second, 2, 30]))
    for rank, heard in enumerate(run(3, other_documents, tmp_path, tmp_path)):
        assert heard["equal"] == heard["beyond the context"] == "4 documents", heard
        said = r"longer: the documents for train: rank 2 on \S+: 4 with lengths of digest "
        assert re.match(said, heard["longer"]), rank
        assert "expected the same on every node: copy one .bin and .idx" in heard["longer"]
        assert re.match(r"--data-path: ranks 1 2 on \S+: \[\('another'", heard["another"])
