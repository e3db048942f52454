"""Imports of a fork server that its processes then need not do: Megatron's trainer, on the CPU.

For that server alone. Unlike every other module it changes the process that imports it, and so,
once for all, what each of the server's processes would change in itself.
"""

import gc
import os
from contextlib import suppress

# Before torch is imported: GPUs of this host stay out of it, and a process has one thread.
os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")

from megatron_epp.mcore.patching import cpu_host, patch_points

cpu_host.install_cpu_host()
with suppress(ValueError):  # another Megatron than ours: every process meets it, and says so
    patch_points.install(patch_points.ALWAYS_PATCH_POINTS)

import megatron.training.training  # noqa: E402, F401
import torch._dynamo  # noqa: E402, F401  # optimizers want it, disabled or not

gc.collect()
gc.freeze()  # what is here stays, and need not be looked through in every process
