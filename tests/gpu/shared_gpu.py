"""``pretrain_gpt`` whose ranks share the host's GPUs, however many there are."""

import os

os.environ["EPP_SHARE_GPUS"] = "1"

from megatron_epp.mcore.trainer import entry

if __name__ == "__main__":
    entry.main()
