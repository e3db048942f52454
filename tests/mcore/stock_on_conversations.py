"""Megatron's own schedule and SFT data: its SFTDataset and SFTTokenizer, as it packs and pads.

What the test compares ``--epp --sft`` with. One line is one conversation and one sample, so the row
is the conversation and padding behind it, which no row in front of it can see: the borders, for
which Megatron's attention needs a GPU, can be left out.
"""

import json
import sys
from pathlib import Path

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

import torch  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import (  # noqa: E402
    BlendedMegatronDatasetBuilder,
)
from megatron.training.datasets import sft_dataset  # noqa: E402

from megatron_epp.mcore.job import megatron_gpt  # noqa: E402
from megatron_epp.mcore.patching import patch_points  # noqa: E402
from megatron_epp.mcore.trainer import entry  # noqa: E402


class Lines:
    """What SFTLowLevelDataset reads with the package ``datasets``."""

    def __init__(self, path: str):
        self.lines = [json.loads(line)["messages"] for line in Path(path).read_text().splitlines()]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> list:
        return self.lines[index]


class WithoutBorders(torch.utils.data.Dataset):
    def __init__(self, dataset: sft_dataset.SFTDataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = self.dataset[index]
        return {key: item[key] for key in ("tokens", "labels", "loss_mask", "position_ids")}


def datasets(samples, vp_stage=None):
    from megatron.training import get_args

    sft_dataset.SFTLowLevelDataset = Lines
    config = megatron_gpt.dataset_config(get_args())
    config.create_attention_mask = False
    built = BlendedMegatronDatasetBuilder(
        sft_dataset.SFTDataset, samples, lambda: True, config
    ).build()
    return WithoutBorders(built[0]), None, None


datasets.is_distributed = True

if __name__ == "__main__":
    # It draws from the generator from which layers with a state then draw theirs.
    patch_points.install((patch_points.FUSION_WARM_UP,))
    hybrid = any(word.startswith("--hybrid-layer-pattern") for word in sys.argv)
    entry.main(datasets=datasets, hybrid=hybrid)
