"""What the fork server for plain worlds imports (forks.py): torch, for one thread a process."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch.distributed  # noqa: F401
