"""Documents of a job, and their global batches."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, print_rank_0

from megatron_epp.corpus.blend import TOKENS
from megatron_epp.mcore.data.documents import config_from_args
from megatron_epp.mcore.data.global_batches import (
    Documents,
    DocumentSource,
    FullPasses,
    GlobalBatches,
    ScheduledSizes,
    build_documents,
    progress_of,
)
from megatron_epp.mcore.data.item_documents import ItemDocuments
from megatron_epp.mcore.job import megatron_gpt
from megatron_epp.mcore.trainer.hooks import TrainerHooks

# Flags by which Megatron counts samples (or tokens, as samples times --seq-length). The line at the
# start names those that are given.
_COUNTING = (
    "train_samples lr_decay_samples lr_warmup_samples lr_wsd_decay_samples step_batch_size_schedule"
)


def consumed_in_phase(args: Any) -> int:
    """Return the number of training samples consumed since the current phase began.

    Phases begin at --phase-transition-iterations; without that flag there is one phase.
    """
    progress = progress_of(args)
    if not args.phase_transition_iterations:
        return progress.consumed_train_samples
    begun = max(at for at in (0, *args.phase_transition_iterations) if at <= progress.iteration)
    return (progress.iteration - begun) * args.global_batch_size


class JobData:
    """Documents of training, validation and test.

    Args:
        overlong: Policy for overlong documents: truncate, drop or split.
        hooks: Components of the trainer, which may replace the corpora.
        blend_by: Unit of a blend's weights: tokens or documents.

    Attributes:
        chats: {chat file: path prefix of its converted corpus}; to be set before
            :meth:`global_batches`.
        truncated_documents: Number of training documents that were truncated to the context.
    """

    def __init__(self, overlong: str, hooks: TrainerHooks, blend_by: str = TOKENS):
        self._overlong, self._hooks, self._blend_by = overlong, hooks, blend_by
        self.chats: Mapping[str, str] = {}
        self.truncated_documents = 0

    def global_batches(
        self, samples: Sequence[int], group: Any
    ) -> tuple[GlobalBatches | None, ...]:
        """Build the documents and return the global batches of training, validation and test.

        All ranks of ``group`` must call this method. The batches begin after the samples that the
        resumed run has consumed. An entry is None for a split without documents. Rank 0 prints the
        numbers of training documents. With --full-validation, the method sets
        ``args.full_validation`` to False and ``args.eval_iters`` to the number of batches of a
        pass.

        Args:
            samples: Number of documents for training, validation and test.
            group: CPU group in which all ranks compare their documents.

        Raises:
            ValueError: Files are damaged, flags are invalid, no document is usable, or ranks have
                different documents.
        """
        args = get_args()
        print_rank_0("> building the documents of training, validation and test ...")
        start, of_training = consumed_in_phase(args), ScheduledSizes()
        if not args.train_samples:  # Megatron computes samples with a constant --global-batch-size
            samples = (of_training.samples(args.train_iters or 0), *samples[1:])
        wanted = samples[0], None if args.full_validation else samples[1], samples[2]  # None: all
        training, validation, test = self._documents(args, wanted, group)
        megatron_gpt.require_validation(args, validation is not None)
        make, of_evaluation = self._hooks.make_batches, args.eval_global_batch_size
        before = progress_of(args).consumed_train_samples - start  # consumed in earlier phases
        batches: list[GlobalBatches | None] = [None, None, None]
        if training is not None:
            batches[0] = make(training, lambda consumed: of_training(before + consumed), start)
            self._describe(training, args)
        for place, documents, consumed in (
            (1, validation, progress_of(args).consumed_valid_samples),
            (2, test, 0),
        ):
            if documents is None or not len(documents):
                continue
            if args.full_validation:
                batches[place] = FullPasses(documents, of_evaluation)
            else:
                batches[place] = make(documents, of_evaluation, consumed)
        if isinstance(passes := batches[1], FullPasses):
            # Megatron would compute eval_iters from its data loader's length, and wrap the loader.
            args.full_validation, args.eval_iters = False, passes.batches
        return tuple(batches)

    def _describe(self, training: DocumentSource, args: Any) -> None:
        """Print the document counts and fractions of training, and set truncated_documents."""
        print_rank_0(f"> {training.counts}")
        self.truncated_documents = training.counts.truncated
        if isinstance(training, Documents):
            if (fractions := training.fractions) is not None:
                print_rank_0(f"> --epp-blend {self._blend_by}: training draws {fractions}")
            print_rank_0(f"> {units_line(args, training.mean_length)}")

    def _documents(
        self, args: Any, samples: Sequence[int | None], group: Any
    ) -> Sequence[DocumentSource | None]:
        context, overlong = args.seq_length, self._overlong
        if self._hooks.items is not None:
            return [
                None
                if items is None
                else ItemDocuments(items, context, overlong, wanted, args.padded_vocab_size)
                for items, wanted in zip(self._hooks.items(samples), samples, strict=True)
            ]
        tokenizer = build_tokenizer(args)
        return build_documents(
            config_from_args(
                args, tokenizer, overlong, args.padded_vocab_size, self.chats, self._blend_by
            ),
            samples,
            group,
        )


def units_line(args: Any, mean_length: float) -> str:
    """Return a line on the tokens of a batch, and on the flags in ``args`` that count documents.

    ``mean_length`` is the mean number of tokens per document.
    """
    values = {name: getattr(args, name, None) for name in _COUNTING.split()}
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in values.items() if value]
    documents = args.global_batch_size
    tokens = documents * mean_length
    return (
        f"--global-batch-size {documents}: documents of {mean_length:.1f} tokens on average, a "
        f"batch about {tokens:,.0f} tokens or {tokens / args.seq_length:.3g} samples of "
        f"--seq-length {args.seq_length}; samples of the learning-rate schedule are documents"
        f"{', as in ' if flags else ''}{', '.join(flags)}"
    )
