"""Documents come whole, through Megatron's builder, in an order that (seed, sample) gives."""

import itertools
import os
import re
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
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_epp.corpus import overlong as overlong_rule
from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.mcore.data.documents import (
    DocumentConfig,
    check_corpora,
    config_from_args,
)
from megatron_epp.mcore.data.global_batches import (
    Documents,
    GlobalBatches,
    build_documents,
    scheduled_samples,
    scheduled_sizes,
)
from megatron_epp.mcore.data.item_documents import ItemDocuments
from tests.runtime.world import run

EOD, PAD, VOCABULARY = 3, 0, 100


class Tokenizer:
    """What Megatron's datasets ask of a tokenizer."""

    eod, eos, pad, vocab_size = EOD, EOD, PAD, VOCABULARY
    unique_identifiers = {"class": "test"}  # noqa: RUF012  Megatron reads it, nobody writes it


def write_corpus(
    prefix: Path, documents: list[list[int]], sentences: int = 1, dtype: type = numpy.int32
) -> str:
    """A .bin/.idx of ``documents``, each in ``sentences`` sequences."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        parts = numpy.array_split(numpy.array(document, dtype=dtype), sentences)
        for part in parts:
            builder.add_item(torch.from_numpy(part))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def numbered(lengths: list[int]) -> list[list[int]]:
    """Documents of these many tokens: 10, 11, ... 89, 10, ... counted on through the corpus."""
    first = numpy.cumsum([0, *lengths])
    return [list(10 + numpy.arange(a, b) % 80) for a, b in itertools.pairwise(first)]


def configure(prefixes: list[str], weights: list[float] | None = None, **changes) -> DocumentConfig:
    settings = {
        "random_seed": 7,
        "sequence_length": 8,
        "blend": (prefixes, weights),
        "split": "1,0,0",
        "tokenizer": Tokenizer(),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
    }
    return DocumentConfig(**(settings | changes))


def train(config: DocumentConfig, size: int | None) -> Documents:
    documents = build_documents(config, [size, 0, 0])[0]
    assert isinstance(documents, Documents)
    return documents


# --- one corpus


def test_items_are_documents_with_the_next_token_as_label(tmp_path: Path) -> None:
    texts = numbered([5, 9, 2, 30, 1])
    documents = train(configure([write_corpus(tmp_path / "a", texts)]), None)
    assert len(documents) == 4
    seen = set()
    for sample in range(4):
        item = documents.dataset[sample]
        inputs, labels = item["tokens"].tolist(), item["labels"].tolist()
        original = next(text for text in texts if text[:2] == [inputs[0], labels[0]])
        assert inputs == original[:-1][:8]
        assert labels == original[1:][:8]
        assert item["loss_mask"].tolist() == [1.0] * len(inputs)
        assert item["position_ids"].tolist() == list(range(len(inputs)))
        assert documents.lengths([sample]).tolist() == [len(inputs)]
        seen.add(inputs[0])
    assert len(seen) == 4


def test_split_pieces_cover_every_label_once(tmp_path: Path) -> None:
    text = numbered([30])[0]
    documents = train(configure([write_corpus(tmp_path / "a", [text])], overlong="split"), None)
    pieces = [
        (documents.tokens(s)[:-1].tolist(), documents.tokens(s)[1:].tolist()) for s in range(4)
    ]
    pieces.sort()
    assert [token for inputs, _ in pieces for token in inputs] == text[:-1]
    assert [token for _, labels in pieces for token in labels] == text[1:]


def test_spans_read_what_the_whole_holds(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a", numbered([40, 3]), dtype=numpy.uint16)
    documents = train(configure([corpus], sequence_length=50), None)
    sample = int(numpy.argmax(documents.lengths([0, 1])))
    whole = documents.tokens(sample)
    assert whole.dtype == numpy.int64
    assert documents.inputs(sample, 5, 12).tolist() == whole[5:12].tolist()
    labels, mask = documents.targets(sample, 30, 39)
    assert labels.tolist() == whole[31:40].tolist()
    assert mask.tolist() == [1.0] * 9
    assert documents.tokens(sample, 7, 7).size == 0
    with pytest.raises(ValueError, match=r"tokens \[0:42\] of item \d, which has 40 tokens"):
        documents.tokens(sample, 0, 42)


def test_a_span_is_all_that_is_read(tmp_path: Path) -> None:
    """A stage that works on a slice must not fetch the document."""
    documents = train(configure([write_corpus(tmp_path / "a", numbered([40]))]), None)
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
    assert asked == [(2, 2), (2, 3)]


def test_loss_mask_is_megatrons(tmp_path: Path) -> None:
    text = [20, EOD, 21, 22, PAD, EOD, 23, EOD]
    corpus = write_corpus(tmp_path / "a", [text])
    for masked in (False, True):
        documents = train(configure([corpus], eod_mask_loss=masked), None)
        labels, mask = documents.targets(0, 0, 7)
        _, expected, _ = _get_ltor_masks_and_position_ids(
            torch.tensor(text[:-1]), EOD, False, False, masked, False
        )
        expected[torch.tensor(text[1:]) == PAD] = 0.0  # as GPTDataset.__getitem__ does
        assert mask.tolist() == expected.tolist()
        assert documents.dataset[0]["loss_mask"].tolist() == expected.tolist()
        assert labels.tolist() == text[1:]
    # The last EOD is a target; only what follows an EOD is masked.
    assert mask.tolist() == [1, 0, 1, 0, 1, 0, 1]


# --- order


def test_order_is_a_permutation_per_epoch(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a", numbered([2 + n % 7 for n in range(20)]))
    dataset = train(configure([corpus]), 60).dataset
    epochs = [dataset.documents(range(20 * e, 20 * e + 20)).tolist() for e in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = train(configure([corpus]), 60).dataset
    assert again.documents(range(55, 60)).tolist() == epochs[2][15:]  # resumed in the third epoch
    other = train(configure([corpus], random_seed=8), 60).dataset
    assert other.documents(range(20)).tolist() != epochs[0]


# --- blends and splits


def test_blend_by_documents_draws_as_megatron_does(tmp_path: Path) -> None:
    prefixes = [
        write_corpus(tmp_path / "a", numbered([3] * 6)),
        write_corpus(tmp_path / "b", numbered([6] * 5)),
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
        prefixes.append(write_corpus(tmp_path / str(number), documents, dtype=numpy.uint8))
    common = {"split": "60,40,0", "sequence_length": 1000}
    of_stock = GPTDatasetConfig(
        **{
            "random_seed": 7,
            "blend": (prefixes, [*weights]),
            "tokenizer": Tokenizer(),
            "reset_position_ids": False,
            "reset_attention_mask": False,
            "eod_mask_loss": False,
            "path_to_cache": str(tmp_path / "cache"),
            **common,
        }
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
        parts = [
            f"{100 * share:.1f}% of the tokens from {prefix}"
            for share, prefix in zip(sums[:, -1] / sums[:, -1].sum(), prefixes, strict=True)
        ]
        assert all(part in documents.fractions for part in parts)


def test_splits_share_no_document(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a", [[10 + n, 11] for n in range(50)])
    parts = build_documents(configure([corpus], split="80,10,10"), [None, None, None])
    firsts = [
        {int(documents.tokens(sample)[0]) for sample in range(len(documents))}
        for documents in parts
    ]
    assert [len(part) for part in firsts] == [40, 5, 5]
    assert set.union(*firsts) == set(range(10, 60))


def test_separate_paths_per_split(tmp_path: Path) -> None:
    one = write_corpus(tmp_path / "one", [[10, 11, 12]])
    two = write_corpus(tmp_path / "two", [[20, 21]])
    config = configure(
        [], blend=None, split=None, blend_per_split=[([one], None), ([two], None), None]
    )
    training, validation, test = build_documents(config, [4, 2, 0])
    assert training.tokens(3).tolist() == [10, 11, 12]
    assert validation.tokens(1).tolist() == [20, 21]
    assert test is None


def test_megatrons_flags_become_the_configuration(tmp_path: Path, parse) -> None:
    corpus = write_corpus(tmp_path / "a", numbered([5, 9]))
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
    flags.mock_data, flags.seq_length = True, 2000
    documents = train(config_from_args(flags, Tokenizer(), "truncate", VOCABULARY), 8)
    lengths = documents.lengths(range(8))
    assert len(set(lengths)) > 4 and lengths.max() == 2000
    for document, length in enumerate(lengths):
        tokens = documents.tokens(document)
        assert len(tokens) == length + 1
        assert (tokens[:-1] == numpy.arange(1, length + 1) % VOCABULARY).all()
        assert (documents.tokens(document, 5, 9) == tokens[5:9]).all()
    flags.mock_data, flags.dataloader_fast_cache_load = False, True
    with pytest.raises(ValueError, match="--dataloader-fast-cache-load skips the reading"):
        config_from_args(flags, Tokenizer(), "drop", VOCABULARY)


# --- loss masks


MASKS = [[0, 0, 1, 1, 0], [0, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0], [0, 0, 0], [1, 1]]


def masked(folder: Path, masks: list[list[int]] = MASKS) -> str:
    """A corpus of as many tokens as ``masks`` have, and these beside it."""
    corpus = write_corpus(folder / "a", numbered([len(mask) for mask in masks]))
    write_corpus(folder / "a_mask", masks, dtype=numpy.uint8)
    return corpus


@pytest.mark.parametrize("overlong", ["truncate", "drop", "split"])
@pytest.mark.parametrize("mapped", [True, False])
def test_only_targets_count_and_nothing_lies_behind_them(
    tmp_path: Path, overlong: str, mapped: bool
) -> None:
    config = configure(
        [masked(tmp_path)], sequence_length=4, overlong=overlong, mmap_bin_files=mapped
    )
    texts = numbered([len(mask) for mask in MASKS])
    documents = train(config, None)
    expected = {
        "truncate": [(0, 0, 3), (1, 0, 3), (3, 0, 1)],
        "drop": [(0, 0, 3), (3, 0, 1)],
        "split": [(0, 0, 3), (1, 0, 3), (1, 4, 4), (3, 0, 1)],
    }[overlong]
    found = []
    for sample in range(len(documents)):
        (length,) = documents.lengths([sample]).tolist()
        labels, mask = documents.targets(sample, 0, length)
        text, start, _ = next(
            (number, start, inputs)
            for number, start, inputs in expected
            if texts[number][start + 1 : start + inputs + 1] == labels.tolist()
        )
        found.append((text, start, length))
        assert mask.dtype == numpy.float32 and mask[-1] == 1
        assert mask.tolist() == MASKS[text][start + 1 : start + length + 1]
        for cut in range(length):  # a span reads what the whole holds
            assert documents.targets(sample, cut, length)[1].tolist() == mask[cut:].tolist()
    assert sorted(found) == expected
    item = documents.dataset[0]
    assert item["loss_mask"].tolist() == documents.targets(0, 0, len(item["tokens"]))[1].tolist()
    planned = open_corpus(f"{tmp_path}/a.idx", context=4, overlong=overlong)
    assert sorted(planned.in_order()) == sorted(length for _, _, length in expected)


def test_masks_meet_the_rules_of_gpt_dataset(tmp_path: Path) -> None:
    """--eod-mask-loss and the padding token take targets away that the masks name."""
    corpus = write_corpus(tmp_path / "a", [[9, EOD, 9, PAD, 9, 9]])
    write_corpus(tmp_path / "a_mask", [[1, 1, 1, 1, 0, 1]], dtype=numpy.uint8)
    documents = train(configure([corpus], eod_mask_loss=True, allow_ambiguous_pad_tokens=True), 1)
    assert documents.targets(0, 0, 5)[1].tolist() == [1.0, 0.0, 0.0, 0.0, 1.0]


def test_a_split_reads_its_own_masks(tmp_path: Path) -> None:
    """And one without a target is refused by name."""
    masks = [[0, 1]] * 8 + [[0, 0]] * 2
    corpus = masked(tmp_path, masks)
    training, _, _ = build_documents(configure([corpus], split="80,20,0"), [None, 0, 0])
    assert (training.counts.documents, training.counts.untargeted) == (8, 0)
    with pytest.raises(ValueError, match=r"valid: 2 sequences fall to it, 2 have no target"):
        build_documents(configure([corpus], split="80,20,0"), [None, 2, 0])


def test_masks_of_a_blend(tmp_path: Path) -> None:
    """Of which one corpus has some and the other none."""
    (tmp_path / "b").mkdir()
    plain = write_corpus(tmp_path / "b" / "a", numbered([6] * 5))
    documents = train(configure([masked(tmp_path), plain], [0.5, 0.5]), 8)
    corpora, _ = documents.locate(range(8))
    assert set(corpora) == {0, 1}
    for sample, corpus in enumerate(corpora):
        length = int(documents.lengths([sample])[0])
        mask = documents.targets(sample, 0, length)[1]
        assert (length == 5 and mask.all()) if corpus else mask[-1] == 1 and length < 9


def test_masks_that_do_not_fit_and_chats_are_refused_at_start(tmp_path: Path) -> None:
    corpus = masked(tmp_path)
    write_corpus(tmp_path / "a_mask", [[0, 1]] * 4, dtype=numpy.uint8)
    with pytest.raises(ValueError, match=r"a_mask\.idx: the mask of sequence 0 has 2 entries"):
        check_corpora(configure([corpus]), [1, 0, 0])
    with pytest.raises(ValueError, match=r"x\.jsonl: no corpus; .* give --sft as well"):
        check_corpora(configure([str(tmp_path / "x.jsonl")]), [1, 0, 0])


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
    ("changes", "said"),
    [
        ({"original_seq_len": 4}, r"original_seq_len \[4\], but original_seq_lens said 5"),
        ({"tokens": torch.arange(3)}, r"{'tokens': 3} rows; expected the 5"),
        ({"labels": None}, "has no 'labels'; expected tokens, labels, loss_mask and"),
        ({"loss_mask": torch.full((9,), 0.5)}, "loss_mask holds other numbers than 0 and 1"),
        ({"tokens": torch.full((9,), 200)}, "holds token 200, but the vocabulary has 200"),
    ],
)
def test_items_that_lie_are_named(changes, said) -> None:
    with pytest.raises(ValueError, match=rf"^item 0 of Listed: {said}"):
        from_items(Listed([5], **changes)).targets(0, 0, 5)


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([[1, 2], [3, 4]], "int64 of shape (2, 2); expected 2 whole numbers"),
        ([1.5, 2.0], "float64 of shape (2,); expected 2 whole numbers"),
        ([5, -1], "from -1 to 5; expected from 0 to"),
        ([0, 0], "no usable document"),
    ],
)
def test_lengths_that_are_none_are_refused(lengths, said) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        from_items(Listed(lengths))


# --- batches


def require_resumes(documents: Documents, size, starts: list[int], last: int) -> None:
    """Every batch is what a run that resumes there draws, and what was seen of it ahead."""
    running = GlobalBatches(documents, size, 0)
    for consumed, stop in itertools.pairwise([*starts, last]):
        ahead, resumed = running.peek(1), next(GlobalBatches(documents, size, consumed))
        batch = next(running)
        assert batch.samples.tolist() == resumed.samples.tolist() == [*range(consumed, stop)]
        assert batch.lengths.tolist() == resumed.lengths.tolist()
        following = running.peek()
        assert (ahead is None) == (following is None) == (consumed == starts[-1])
        if ahead is not None:
            assert ahead.samples.tolist() == following.samples.tolist()
            assert ahead.lengths.tolist() == following.lengths.tolist()
    with pytest.raises(ValueError, match=f"the data set ends after {len(documents)} documents"):
        next(running)


def test_batches_resume_anywhere(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a", numbered([2 + n % 9 for n in range(11)]))
    require_resumes(train(configure([corpus]), 40), 4, [*range(0, 40, 4)], 40)


def test_batches_grow_as_megatron_says_and_resume(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a", numbered([2 + n % 9 for n in range(11)]))
    try:
        num_microbatches_calculator.init_num_microbatches_calculator(
            0, None, None, 1, 1, step_batch_size_schedule="0:2 4:3 10:6"
        )
        sizes = scheduled_sizes()
        assert scheduled_samples(6, sizes) == 22
        require_resumes(train(configure([corpus]), 22), sizes, [0, 2, 4, 7, 10, 16], 22)
        # Megatron's own was asked for nothing.
        assert num_microbatches_calculator.get_current_global_batch_size() == 2
    finally:
        num_microbatches_calculator.unset_num_microbatches_calculator()


@pytest.mark.parametrize("overlong", ["truncate", "drop", "split"])
def test_planning_from_the_index_draws_what_training_draws(tmp_path: Path, overlong: str) -> None:
    corpus = write_corpus(tmp_path / "a", numbered([1 + n % 17 for n in range(40)]))
    config = configure([corpus], overlong=overlong, sequence_length=6)
    planned = open_corpus(f"{corpus}.idx", context=6, overlong=overlong)
    batches = GlobalBatches(train(config, 200), 16, 0)
    for number in range(200 // 16):
        assert planned.batch(number, 16, seed=7) == tuple(next(batches).lengths)


def test_a_start_indexes_each_split_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at the start and the data sets are given one index, not two alike."""
    from megatron_epp.mcore.data import documents as module

    calls = []

    def counted(inputs: numpy.ndarray, *others) -> overlong_rule.DocumentIndex:
        calls.append(len(inputs))
        return overlong_rule.apply_context(inputs, *others)

    monkeypatch.setattr(module, "apply_context", counted)
    corpus = write_corpus(tmp_path / "a", numbered([2 + n % 9 for n in range(50)]))
    train(configure([corpus], split="80,10,10"), None)
    assert calls == [40, 5, 5]


# --- what can be wrong


def damaged(tmp_path: Path, name: str) -> str:
    return write_corpus(tmp_path / name, numbered([5, 9, 2]))


def test_missing_files(tmp_path: Path) -> None:
    prefix = damaged(tmp_path, "a")
    with pytest.raises(ValueError, match=r"nowhere\.idx: no such file; expected the index"):
        train(configure([str(tmp_path / "nowhere")]), None)
    with pytest.raises(ValueError, match=rf"give {prefix}, without the suffix"):
        train(configure([prefix + ".bin"]), None)
    Path(prefix + ".bin").unlink()
    with pytest.raises(ValueError, match=r"a\.bin: no such file; expected the tokens"):
        train(configure([prefix]), None)


def test_no_usable_document(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "a", [[10], [11], [12] * 30])
    with pytest.raises(
        ValueError,
        match=r"a: no usable document for train: 3 sequences fall to it, "
        r"2 have fewer than 2 tokens, 1 are dropped for exceeding 8 tokens; .* truncate or split",
    ):
        train(configure([prefix], overlong="drop"), 10)
    with pytest.raises(ValueError, match="no usable document for test: 0 sequences fall to it"):
        check_corpora(configure([prefix], split="98,1,1"), [10, 0, 2])
    # Nothing is wanted of it: no complaint.
    check_corpora(configure([prefix], split="98,1,1"), [10, 0, 0])
    empty = write_corpus(tmp_path / "empty", [[], []])
    with pytest.raises(ValueError, match="none of its 2 sequences holds a token"):
        train(configure([empty]), 10)


@pytest.mark.parametrize("dtype", [numpy.uint16, numpy.int32])
def test_the_scan_is_exact_where_it_covers_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: type
) -> None:
    from megatron_epp.corpus import idx_file

    monkeypatch.setattr(idx_file, "BLOCK_BYTES", 8)  # blocks of few tokens, the last one short
    for wrong in range(7):
        tokens = [10] * 7
        tokens[wrong] = 99
        prefix = write_corpus(tmp_path / str(wrong), [tokens], dtype=dtype)
        check_corpora(configure([prefix], vocabulary_size=100), [1, 0, 0])
        with pytest.raises(ValueError, match=r"\.bin: holds token 99, but the vocabulary has 99"):
            check_corpora(configure([prefix], vocabulary_size=99), [1, 0, 0])


def test_tokens_that_the_scan_missed_are_refused_when_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large corpus is only sampled at the start: reading is the second line."""
    from megatron_epp.corpus import idx_file

    monkeypatch.setattr(idx_file, "BLOCK_BYTES", 8)
    monkeypatch.setattr(idx_file, "SCAN_BYTES", 16)  # first and last block only
    prefix = write_corpus(tmp_path / "a", [[10, 11], [99, 11], [10, 11]])
    documents = train(configure([prefix], vocabulary_size=99), None)
    with pytest.raises(ValueError, match="holds token 99"):
        for sample in range(3):
            documents.tokens(sample)


def test_sentence_split_corpus_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = write_corpus(tmp_path / "a", numbered([20, 20]), sentences=4)
    documents = train(configure([prefix], split="50,25,25"), None)
    assert documents.lengths(range(4)).tolist() == [4] * 4
    lines = [record.message for record in caplog.records if "sentences" in record.message]
    assert len(lines) == 1
    assert "8 sequences in 2 documents" in lines[0]


def test_a_corpus_without_weights_lasts_one_epoch(tmp_path: Path) -> None:
    """Megatron mixes such corpora as they are; the end is said, not met as StopIteration."""
    prefixes = [write_corpus(tmp_path / n, numbered([4] * 3)) for n in "ab"]
    batches = GlobalBatches(train(configure(prefixes), 100), 4, 0)
    next(batches)
    with pytest.raises(ValueError, match=r"the data set ends after 6 documents.* without weights"):
        next(batches)


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


def test_nodes_with_other_documents_are_told_at_start(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
        write_corpus(tmp_path / str(rank) / "equal", numbered([5, 9, 2, 30]))
        write_corpus(tmp_path / str(rank) / "another", numbered([5, 9, 2, 30]))
        write_corpus(tmp_path / str(rank) / "longer", numbered([5, 9 - (rank == 2), 2, 30]))
    heard = run(3, other_documents, tmp_path, tmp_path)
    for rank, mine in enumerate(heard):
        assert mine["equal"] == "4 documents", mine
        said = "longer: the documents for train have other lengths on ranks 2 than on"
        assert said in mine["longer"], rank
        assert "expected the same lengths everywhere: copy one longer.bin" in mine["longer"]
        assert mine["beyond the context"] == "4 documents"
        assert "ranks 1 2 hold digest" in mine["another"]
        assert mine["another"].endswith("expected the same corpora on every node")
