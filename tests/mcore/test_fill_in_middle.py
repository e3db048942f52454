"""Fill-in-the-middle: what Megatron's data set makes of a document that is its first sample."""

import argparse
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig

from megatron_epp.mcore.data.documents import config_from_args
from megatron_epp.mcore.data.fill_in_middle import fim_fields
from megatron_epp.mcore.data.global_batches import Documents, build_documents
from megatron_epp.mcore.trainer.job_data import JobData
from tests.mcore.runs import flags, train, trained
from tests.mcore.test_documents import write_corpus

CONTEXT, SEED = 300, 11
TEXT = "a line of a file, and one more behind it, 0123456789;\n"
WORDS = [60, 3, 200, 90, 12, 150]
SENTINELS = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<|endoftext|>", "<file>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tokenizer of bytes, and a corpus of its texts: some of several files, some of several
    documents within a sequence, and each with its end."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    place = tmp_path_factory.mktemp("fim")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SENTINELS,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([TEXT], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|endoftext|>")
    made.save_pretrained(place / "tokenizer")
    end, file = made.convert_tokens_to_ids(["<|endoftext|>", "<file>"])
    documents = []
    for number, count in enumerate(WORDS):
        tokens = made(TEXT * count).input_ids[number : number + count]
        if number % 2:
            tokens[count // 3] = file
        if number % 3 == 0:
            tokens[count // 2] = end
        documents.append([*tokens, end])
    write_corpus(place / "corpus", documents, dtype=numpy.uint16)
    return place


def words(folder: Path, **changes: object) -> list[str]:
    named = {
        "data_path": folder / "corpus",
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": folder / "tokenizer",
        "vocab_size": None,
        "seq_length": CONTEXT,
        "max_position_embeddings": CONTEXT,
        "seed": SEED,
        "fim_data": True,
        "fim_rate": 0.9,
        "epp": True,
    }
    return flags(folder / "corpus", **named | changes)


def documents_of(args: argparse.Namespace) -> Documents:
    config = config_from_args(args, build_tokenizer(args), "truncate", args.padded_vocab_size)
    documents = build_documents(config, [2 * len(WORDS), 0, 0])[0]
    assert isinstance(documents, Documents)
    return documents


def stock(args: argparse.Namespace, tokens: numpy.ndarray, seed: int, folder: Path) -> dict:
    """The first sample of Megatron's data set of one document, all of which is that sample."""
    prefix = write_corpus(folder / f"alone{seed}", [tokens.tolist()], dtype=numpy.uint16)
    config = GPTFIMDatasetConfig(
        random_seed=seed,
        sequence_length=len(tokens) - 1,
        blend=([prefix], None),
        split="1,0,0",
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        path_to_cache=str(folder / "cache"),
        **fim_fields(args),
    )
    built = BlendedMegatronDatasetBuilder(GPTFIMDataset, [1, 0, 0], lambda: True, config).build()
    return built[0][0]


SETTINGS = {
    "as one text": {},
    "suffix first": {"fim_spm_rate": 1.0},
    "file by file": {"fim_split_sample": "<file>", "fim_fragment_rate": 0.8},
    "some texts alone": {"fim_no_prefix": "a li"},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_document_is_what_megatron_makes_of_it_alone(folder, setting, tmp_path, parse) -> None:
    args = parse(*words(folder, **SETTINGS[setting]))
    documents, corpus = documents_of(args), IndexedDataset(str(folder / "corpus"))
    (part,) = documents.parts
    changed = 0
    for sample in range(len(documents)):  # two epochs
        sequence = int(part.index.sequences[part.documents([sample])[0]])
        stored = corpus[sequence][: CONTEXT + 1]
        found, wanted = part[sample], stock(args, stored, SEED + sample, tmp_path)
        assert documents.lengths([sample]) == len(stored) - 1 == len(found["tokens"])
        for key in ("tokens", "labels", "loss_mask"):
            assert found[key].tolist() == wanted[key].tolist(), (sample, key)
        changed += found["tokens"].tolist() != stored[:-1].tolist()
        # A slice reads what the whole has, on any stage, in any order.
        whole = documents.tokens(sample)
        last = len(stored) - 1
        for start, stop in ((last // 2, last), (0, 2), (1, last // 2 + 1)):
            assert (documents.inputs(sample, start, stop) == whole[start:stop]).all()
            labels, _ = documents.targets(sample, start, stop)
            assert (labels == whole[start + 1 : stop + 1]).all()
    assert changed > len(WORDS) // 2


def test_training_takes_the_texts_on_every_stage(folder, tmp_path, parse) -> None:
    """As it trains on a corpus into which they were written before."""
    alike = {"train_iters": 1, "seq_length": 64, "max_position_embeddings": 64}
    documents = documents_of(parse(*words(folder, **alike)))
    (part,) = documents.parts
    places = part.index.sequences[part.documents(range(len(WORDS)))]
    texts = [documents.tokens(int(sample)).tolist() for sample in places.argsort()]
    written = write_corpus(tmp_path / "written", texts, dtype=numpy.uint16)
    filled = trained(words(folder, **alike))
    before = train(words(folder, **alike, data_path=written, fim_data=None, fim_rate=None))
    assert len(filled.losses) == 1 and filled.losses == before.losses, before.output
    assert filled.grad_norms == before.grad_norms


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fim_spm_rate": 1.5}, "--fim-spm-rate 1.5: expected a probability"),
        ({"fim_split_sample": "<file>"}, "--fim-fragment-rate None: expected a probability"),
        ({"fim_middle_token": "<hole>"}, "--fim-middle-token <hole>: token None of"),
        (
            {"tokenizer_type": "NullTokenizer", "tokenizer_model": None, "vocab_size": 400},
            "--fim-data: NullTokenizer gives no text",
        ),
    ],
)
def test_what_cannot_be_filled_in_is_one_line(folder, changes, said, parse) -> None:
    args = parse(*words(folder, **changes))
    with pytest.raises(ValueError, match=said) as refusal:
        documents_of(args)
    assert "\n" not in str(refusal.value)


def test_documents_from_python_are_read_as_they_are() -> None:
    data = JobData("truncate", SimpleNamespace(items=list))
    args = argparse.Namespace(seq_length=8, fim_data=True)
    with pytest.raises(ValueError, match="--fim-data: documents from Python"):
        data._documents(args, [1], None)


def test_masks_of_a_document_written_anew(folder, tmp_path, parse) -> None:
    prefix = write_corpus(tmp_path / "a", [[7] * 9, [8] * 5])
    write_corpus(tmp_path / "a_mask", [[1] * 9, [1] * 5], dtype=numpy.uint8)
    args = parse(*words(folder, data_path=prefix))
    with pytest.raises(ValueError, match=r"a_mask.idx: loss masks of documents that --fim-data"):
        documents_of(args)
