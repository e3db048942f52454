"""What is made of flash-linear-attention's kernels so that they suit chunks of many sizes."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_epp.ir import Span
from megatron_epp.layers.chunk_state import ChunkState, Rows
from megatron_epp.layers.ssm.carried import HOST_LENGTHS, CarriedStates
from megatron_epp.mcore.patching import cpu_host
from megatron_epp.runtime.kv_store import Store

cpu_host.install_cpu_host()

from megatron_epp.mcore.kinds.ssm import fla_kernels  # noqa: E402


def tuned(*key):
    """As triton.autotune: a decorator of a kernel that names what it is tuned by."""

    def decorate(body):
        kernel = SimpleNamespace(fn=SimpleNamespace(fn=body), launched=[])
        kernel.run = lambda *inputs, **named: kernel.launched.append(named)
        return kernel

    return decorate


@tuned("D", "NB")
def unread(x, D, NB):  # noqa: N803
    return x + D


@tuned("D", "NB")
def reads(x, D, NB):  # noqa: N803
    return x + NB


def test_a_kernel_that_does_not_read_the_number_of_rows_is_tuned_once() -> None:
    for kernel, numbers in ((unread, {1}), (reads, {1, 2, 5})):
        fla_kernels.tune_once(kernel)
        for number in (1, 2, 5):
            kernel.run(grid=(1,), D=8, NB=number)
        assert {launch["NB"] for launch in kernel.launched} == numbers
        assert all(launch["D"] == 8 for launch in kernel.launched)
    fla_kernels.tune_once(SimpleNamespace(run=None))  # of another package: stays as it is


@pytest.fixture
def released(monkeypatch):
    """A package with the names of a release's, of which two modules have the table's function."""
    calls = []

    def prepare_chunk_indices(cu_seqlens, chunk_size, cu_seqlens_cpu=None):
        calls.append(chunk_size)
        return cu_seqlens

    made = {}
    for name in ("fla", "fla.ops", "fla.ops.utils", "fla.ops.utils.index", "fla.ops.rule"):
        made[name] = ModuleType(name)
        made[name].__path__ = []
        monkeypatch.setitem(sys.modules, name, made[name])
    for name in ("fla.ops.utils.index", "fla.ops.rule"):
        made[name].prepare_chunk_indices = prepare_chunk_indices
    fla_kernels.suit_many_sizes.cache_clear()
    yield SimpleNamespace(calls=calls, **{name.replace(".", "_"): m for name, m in made.items()})
    fla_kernels.suit_many_sizes.cache_clear()


def test_tables_of_blocks_are_made_without_a_wait(released) -> None:
    fla_kernels.suit_many_sizes()
    table = importlib.import_module("fla.ops.rule").prepare_chunk_indices
    assert table is released.fla_ops_utils_index.prepare_chunk_indices
    whole = ChunkState(0, (Rows(0, 130, Span(0, 0, 130), False, True),), 144, "k", Store({}))
    states = CarriedStates(whole, 0, 4, 8)
    boundaries = states.boundaries(0, 0, torch.device("cpu"))
    assert boundaries.tolist() == [0, 130, 144] and getattr(boundaries, HOST_LENGTHS) == (130, 14)
    assert table(boundaries, 64).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0]]
    assert table(boundaries, 64, cu_seqlens_cpu=None) is table(boundaries, 64)
    assert len(table(boundaries, 16)) == 10
    assert not released.calls
    assert table(torch.tensor([0, 7]), 64).tolist() == [0, 7] and released.calls == [64]


def test_sequences_that_end_in_the_midst_of_a_block_begin_another() -> None:
    assert fla_kernels.block_table((1, 64, 65), 64).tolist() == [[0, 0], [1, 0], [2, 0], [2, 1]]
