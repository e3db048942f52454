"""In an iteration, the host waits for no value of the device.

On a GPU torch refuses what would wait. With emulated kernels, reads of numbers that only a device
computes are refused, except in the kernels: tensors of lengths and positions are the host's, too.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_epp.ir import Plan
from megatron_epp.mcore.patching import emulated_engine
from tests.mcore.fault_injection import fault

pytestmark = pytest.mark.gpu

KERNELS = str(Path(__file__).parents[1] / "engine")
aten = torch.ops.aten
READS = (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default)
SIZED_BY_VALUES = (aten.nonzero.default, aten.masked_select.default)
PLAN = """\
plan v1
replica 0 of 1
documents 30 9
layers 2
chunk 0: 0[0:20]
chunk 1: 0[20:30] 1[0:9]
recompute 0: 1k1o 1n1k
stage 0: F0 F1 B1 B0
"""


class NoReads(TorchDispatchMode):
    """Ops for whose result a host would wait are refused."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # its import takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = func in READS and args[0].is_floating_point()
        by_mask = func is aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if (reads or by_mask or func in SIZED_BY_VALUES) and not in_a_kernel():
            raise RuntimeError(f"the host waits for {func}, a synchronizing operation")
        return func(*args, **(kwargs or {}))


def in_a_kernel() -> bool:
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:
        if frame.f_code.co_filename.startswith(KERNELS):
            return True
    return False


@contextmanager
def without_waiting() -> Iterator[None]:
    if emulated_engine.is_started():
        with NoReads():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def loss_is_read(chunk_loss: Any, mask: Tensor, losses: Tensor, **named: Any) -> Any:
    assert float(losses.sum()) >= 0
    return chunk_loss(mask, losses, **named)


def mask_as_index(chunk_loss: Any, mask: Tensor, losses: Tensor, **named: Any) -> Any:
    assert losses.view(-1)[mask.view(-1) > 0].dim() == 1
    return chunk_loss(mask, losses, **named)


def test_no_op_of_an_iteration_waits(alone, engine) -> None:
    from megatron_epp.mcore.model import forward
    from scripts.bench.single_stage import build_stage, run_stage

    plan, model = Plan.parse(PLAN), build_stage(alone, 2, True, True)
    run_stage(alone, model, plan, 0)  # what happens once, as compiling
    with without_waiting():
        run_stage(alone, model, plan, 0)
    for broken in (loss_is_read, mask_as_index):
        with fault(forward, "chunk_loss", broken)(), without_waiting():
            with pytest.raises(RuntimeError, match="synchronizing"):
                run_stage(alone, model, plan, 0)
