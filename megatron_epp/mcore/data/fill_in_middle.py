"""Documents rewritten for fill-in-the-middle training (``--fim-data``) by Megatron's GPTFIMDataset.

    original     a b c d e f g h    prefix a b, middle c d e, suffix f g h (random boundaries)
    PSM          P a b S f g h M    P, S, M: --fim-prefix-token, --fim-suffix-token,
    SPM          P S f g h M a b             --fim-middle-token

A rewritten document is truncated, or padded with --fim-pad-token, to the original length.
Megatron's class draws from one stream of random numbers, so a sample depends on all samples that
were read before. In this module, each item i has a separate stream with the seed ``--seed`` + i.
So every stage, every replica and a resumed run read equal tokens.
"""

import argparse
import inspect
from typing import Any

import numpy
from megatron.core.datasets.utils import Split
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig

_SPECIAL = ("prefix", "middle", "suffix", "pad", "eod")
_SEEDS = 1 << 32  # of numpy's RandomState


def fim_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that GPTFIMDatasetConfig adds to GPTDatasetConfig, from ``args``."""
    return {
        "fim_rate": args.fim_rate,
        "fim_spm_rate": args.fim_spm_rate,
        "fim_extra_tokens": {name: getattr(args, f"fim_{name}_token") for name in _SPECIAL},
        "fim_split_sample": args.fim_split_sample,
        "fim_fragment_rate": args.fim_fragment_rate,
        "fim_no_prefix": args.fim_no_prefix,
    }


class FillInMiddle:
    """Callable that rewrites a document for fill-in-the-middle, for ``DocumentConfig.rewrite``.

    Args:
        config: Megatron's dataset configuration, with the FIM rates and special tokens.
        words: Number of rows of the embedding; None disables the check of the special tokens.

    Raises:
        ValueError: The tokenizer cannot decode without special tokens, the tokenizer lacks one of
            the FIM tokens, or a rate is not between 0 and 1.
    """

    def __init__(self, config: GPTFIMDatasetConfig, words: int | None):
        _require(config, words)
        self._sample = _OneSample(
            _OneDocument(numpy.zeros(1)), None, numpy.arange(1), 1, Split.train, config
        )

    @classmethod
    def of(
        cls, args: argparse.Namespace, fields: dict[str, Any], words: int | None
    ) -> "FillInMiddle":
        """Return the callable for Megatron's ``args``; ``fields`` are those of GPTDatasetConfig."""
        return cls(GPTFIMDatasetConfig(**fields, **fim_fields(args)), words)

    def __call__(self, tokens: numpy.ndarray, item: int) -> numpy.ndarray:
        """Return the rewritten ``tokens``, [n] -> [n] int64, drawn with the seed --seed + item."""
        sample = self._sample
        sample.dataset = _OneDocument(tokens)
        sample.sample_index = _bounds(tokens)
        sample.np_rng = numpy.random.RandomState((sample.config.random_seed + item) % _SEEDS)
        return sample._query_document_sample_shuffle_indices(0)[0]


class _OneDocument:
    """Corpus of one document, with the method ``get`` that GPTFIMDataset calls."""

    def __init__(self, tokens: numpy.ndarray):
        self.tokens = tokens

    def get(self, document: int, offset: int, length: int) -> numpy.ndarray:
        return self.tokens[offset : offset + length]


class _OneSample(GPTFIMDataset):
    """Megatron's FIM dataset with a single sample: the only document of its corpus."""

    def _build_document_sample_shuffle_indices(self) -> tuple[numpy.ndarray, ...]:
        return numpy.zeros(1, int), _bounds(self.dataset.tokens), numpy.zeros(1, int)


def _bounds(tokens: numpy.ndarray) -> numpy.ndarray:
    """Return Megatron's sample index of one document: [[0, first token], [0, last token]]."""
    return numpy.array([[0, 0], [0, len(tokens) - 1]])


def _require(config: GPTFIMDatasetConfig, words: int | None) -> None:
    """Raise a ValueError if the tokenizer, a rate or a FIM token prevents rewriting."""
    tokenizer = config.tokenizer
    library = getattr(tokenizer, "_tokenizer", tokenizer)
    if "remove_special_tokens" not in inspect.signature(library.ids_to_text).parameters:
        raise ValueError(
            f"--fim-data: {type(library).__name__} gives no text without its special tokens; "
            "expected --tokenizer-type HuggingFaceTokenizer, GPT2BPETokenizer or TikTokenizer"
        )
    rates = {"fim-rate": config.fim_rate, "fim-spm-rate": config.fim_spm_rate}
    if config.fim_split_sample is not None:
        rates["fim-fragment-rate"] = config.fim_fragment_rate
    for flag, rate in rates.items():
        if rate is None or not 0 <= rate <= 1:
            raise ValueError(f"--{flag} {rate}: expected a probability, from 0 to 1")
    special = {f"fim-{name}-token": config.fim_extra_tokens[name] for name in _SPECIAL}
    if config.fim_split_sample is not None:
        special["fim-split-sample"] = config.fim_split_sample
    for flag, token in special.items():
        try:
            (number,) = library.tokens_to_ids([token])
        except KeyError:  # tiktoken raises it
            number = None
        if number is None or (words is not None and number >= words):
            raise ValueError(
                f"--{flag} {token}: token {number} of the tokenizer; expected one that it has, "
                f"within the {words} of the model"
            )
