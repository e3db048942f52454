"""Imports of a fork server whose processes run Megatron's trainer on the CPU.

The forked processes inherit the imports and need not repeat them. Unlike every other module, this
module changes the process that imports it: it hides GPUs, sets one thread per process, installs the
replacements for a CPU-only host and the patches of Megatron, and excludes the imported objects from
garbage collection.
"""

import gc
import os
from contextlib import suppress

# Before torch is imported: hide this host's GPUs, and use one thread per process.
os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")

from megatron_epp.mcore.patching import cpu_host, patch_points

cpu_host.install_cpu_host()
with suppress(ValueError):  # another version of Megatron: every process reports it
    patch_points.install(patch_points.ALWAYS_PATCH_POINTS)

import megatron.training.training  # noqa: E402, F401
import torch._dynamo  # noqa: E402, F401  # optimizers import it, even if disabled

gc.collect()
gc.freeze()  # these objects live until the end, so no process needs to scan them
