"""Megatron's own schedule and loss, fed with whole documents in the order of our dataset.

What the test compares ``--epp`` with: documents of one length, one per micro-batch.
"""

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

import sys  # noqa: E402

import numpy  # noqa: E402
import torch  # noqa: E402

from megatron_epp.mcore.data.documents import config_from_args  # noqa: E402
from megatron_epp.mcore.data.global_batches import Documents, build_documents  # noqa: E402
from megatron_epp.mcore.patching import patch_points  # noqa: E402
from megatron_epp.mcore.trainer import entry  # noqa: E402


class Samples(torch.utils.data.Dataset):
    def __init__(self, documents: Documents):
        self.documents = documents

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, sample: int) -> dict[str, numpy.ndarray]:
        length = int(self.documents.lengths([sample])[0])
        labels, loss_mask = self.documents.targets(sample, 0, length)
        return {
            "tokens": self.documents.inputs(sample, 0, length),
            "labels": labels,
            "loss_mask": loss_mask,
            "position_ids": numpy.arange(length),
        }


def datasets(samples, vp_stage=None):
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args

    args = get_args()
    config = config_from_args(args, build_tokenizer(args), "truncate", args.padded_vocab_size)
    train = build_documents(config, samples)[0]
    return Samples(train), None, None


datasets.is_distributed = True

if __name__ == "__main__":
    # It draws from the generator from which routers then draw their weights; --epp leaves it out.
    patch_points.install((patch_points.FUSION_WARM_UP,))
    hybrid = any(word.startswith("--hybrid-layer-pattern") for word in sys.argv)
    entry.main(datasets=datasets, hybrid=hybrid)
