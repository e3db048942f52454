"""``pretrain_gpt`` whose ranks share the host's GPUs, however many there are.

A rank that does not move says so after ten seconds: the steps of a GPU day are short.
"""

import os

os.environ["EPP_SHARE_GPUS"] = "1"

from megatron_epp.mcore.trainer import entry
from megatron_epp.runtime import watcher

watcher.PATIENCE_SECONDS = 10.0

if __name__ == "__main__":
    entry.main()
