"""``pretrain_gpt`` whose ranks all take the host's first GPU."""

import os

os.environ["LOCAL_RANK"] = "0"

from megatron_epp.mcore.trainer import entry

if __name__ == "__main__":
    entry.main()
