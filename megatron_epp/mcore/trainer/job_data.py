"""The documents of a job, and the global batches made of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, global_vars, print_rank_0

from megatron_epp.mcore.data.documents import config_from_args
from megatron_epp.mcore.data.global_batches import (
    DocumentSource,
    GlobalBatches,
    build_documents,
    scheduled_samples,
    scheduled_sizes,
)
from megatron_epp.mcore.data.item_documents import ItemDocuments
from megatron_epp.mcore.job import megatron_gpt
from megatron_epp.mcore.trainer.hooks import TrainerHooks


class JobData:
    """Reads the documents of training, validation and test.

    chats                the corpora that chat files were converted to, by file
    truncated_documents  how many documents of the training set were truncated
    """

    def __init__(self, overlong: str, hooks: TrainerHooks):
        self._overlong, self._hooks = overlong, hooks
        self.chats: Mapping[str, str] = {}
        self.truncated_documents = 0

    def global_batches(
        self, samples: Sequence[int], group: Any
    ) -> tuple[GlobalBatches | None, ...]:
        """Return the global batches of training, validation and test, from where the checkpoint
        stopped.

        Args:
            samples: how many documents each of the three needs.
            group: process group of all ranks, over which indices are built once.
        """
        args = get_args()
        print_rank_0("> building the documents of training, validation and test ...")
        of_training = scheduled_sizes()
        if not args.train_samples:  # Megatron counts --global-batch-size for each iteration
            samples = (scheduled_samples(args.train_iters or 0, of_training), *samples[1:])
        documents = self._documents(args, samples, group)
        sizes = (of_training, args.eval_global_batch_size, args.eval_global_batch_size)
        # Later Megatrons (#7447) count in a state of their own, no longer in their arguments.
        progress = getattr(global_vars, "get_train_state", get_args)()
        consumed = (progress.consumed_train_samples, progress.consumed_valid_samples, 0)
        batches: list[GlobalBatches | None] = []
        megatron_gpt.require_validation(args, documents[1] is not None)
        for docs, size, start in zip(documents, sizes, consumed, strict=True):
            if isinstance(docs, list):
                raise ValueError("--epp evaluates on one validation set; leave --multiple-... out")
            batches.append(None if docs is None else self._hooks.make_batches(docs, size, start))
        training = documents[0]
        if training is not None and not isinstance(training, list):
            print_rank_0(f"> {training.counts}")
            self.truncated_documents = training.counts.truncated
        return tuple(batches)

    def _documents(
        self, args: Any, samples: Sequence[int], group: Any
    ) -> Sequence[DocumentSource | list | None]:
        context, overlong = args.seq_length, self._overlong
        if self._hooks.items is not None:
            if args.fim_data:
                raise ValueError("--fim-data: documents from Python are read as they are")
            return [
                None
                if items is None
                else ItemDocuments(items, context, overlong, wanted, args.padded_vocab_size)
                for items, wanted in zip(self._hooks.items(samples), samples, strict=True)
            ]
        tokenizer = build_tokenizer(args)
        return build_documents(
            config_from_args(args, tokenizer, overlong, args.padded_vocab_size, self.chats),
            samples,
            group,
        )
