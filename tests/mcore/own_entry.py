"""An entry script of one's own, whose documents come from Python: ``ITEMS`` names a file of them.

A pickle of (tokens, mask) of every document.
"""

import os
import pickle
from pathlib import Path

import megatron_epp

megatron_epp.prepare_host()

import torch  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.training import pretrain, set_startup_timestamps  # noqa: E402
from megatron.training.argument_utils import (  # noqa: E402
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)

from megatron_epp.mcore.job import job_exit, megatron_gpt  # noqa: E402
from megatron_epp.mcore.job.read_flags import read_flags  # noqa: E402

PADDING = 5


class Items(torch.utils.data.Dataset):
    """Padded, as those of a variable-length dataset are; labels that do not count are -100."""

    def __init__(self, documents):
        self.documents = documents
        self.original_seq_lens = [len(tokens) - 1 for tokens, _ in documents]

    def __len__(self):
        return len(self.documents)

    def __getitem__(self, index):
        tokens, mask = (torch.tensor(column) for column in self.documents[index])
        counts = mask[1:] > 0
        padded = torch.nn.functional.pad
        return {
            "tokens": padded(tokens[:-1], (0, PADDING)),
            "labels": padded(torch.where(counts, tokens[1:], -100), (0, PADDING), value=-100),
            "loss_mask": padded(counts.float(), (0, PADDING)),
            "original_seq_len": torch.tensor([len(tokens) - 1]),
        }


def main():
    set_startup_timestamps(0.0, 0.0)
    args = read_flags()
    describe = hybrid_config_from_args if args.hybrid_layer_pattern else gpt_config_from_args
    model = describe(args)
    items = Items(pickle.loads(Path(os.environ["ITEMS"]).read_bytes()))
    forward_step, datasets = megatron_epp.install(args, model, lambda wanted: (items, None, None))
    pretrain(
        pretrain_cfg_container_from_args(args, model),
        datasets,
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=megatron_gpt.embedding_ranks,
    )


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        if not job_exit.is_users_mistake(error):
            raise
        job_exit.refuse_and_exit(error)
    job_exit.finish()
