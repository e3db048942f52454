"""The heap is trimmed where a process has far more than it ever needed; holes go back."""

import subprocess
import sys

import pytest

from megatron_epp.runtime.malloc_trim import HostHeap


class Host:
    """A process with ``resident`` bytes, of which ``in_use`` cannot be given back."""

    def __init__(self):
        self.resident = self.in_use = 10
        self.trims = 0

    def trim(self):
        self.resident, self.trims = self.in_use, self.trims + 1

    def heap(self, step_bytes: int) -> HostHeap:
        return HostHeap(step_bytes, lambda: self.resident, self.trim)


def test_nothing_is_trimmed_before_the_process_has_grown_by_a_step() -> None:
    host = Host()
    heap = host.heap(50)
    host.resident = 40
    heap.begin()
    assert not heap.settle()
    host.resident = 59
    heap.begin()  # what grew between ops is none of an op's
    assert not heap.settle() and host.trims == 0
    host.resident = 60
    heap.begin()
    assert heap.settle() and host.trims == 1 and host.resident == 10


def test_what_one_op_takes_is_not_given_back_behind_each() -> None:
    """An op of 100 bytes, all of them free behind it: it is trimmed once, and then left."""
    host = Host()
    heap = host.heap(50)
    heap.begin()
    trims = []
    for _ in range(5):
        host.resident = max(host.resident, host.in_use + 100)
        trims.append(heap.settle())
    assert not any(trims), "the first op tells what an op takes"
    host.resident = 300  # holes upon holes
    heap.begin()
    assert heap.settle() and host.resident == 10
    host.resident = 110
    assert not heap.settle()


def test_what_was_in_use_after_a_trim_is_remembered() -> None:
    host = Host()
    heap = host.heap(50)
    host.resident = host.in_use = 170
    heap.begin()
    assert heap.settle()
    host.in_use = 10
    for resident in (250, 339):
        host.resident = resident
        heap.begin()
        assert not heap.settle()
    host.resident = 340
    heap.begin()
    assert heap.settle() and host.resident == 10


@pytest.mark.parametrize("steps", [[30, -30] * 20, [10] * 30, [60, -60, 5] * 10])
def test_never_more_than_twice_what_was_in_use_at_once(steps) -> None:
    """At the worst: nothing that is freed is ever used again."""
    host = Host()
    heap = host.heap(50)
    heap.begin()
    most = host.in_use
    for step in steps:
        host.in_use += step
        host.resident += max(0, step)
        most = max(most, host.in_use)
        heap.settle()
        needed = most + max(steps)
        assert host.resident < needed + max(50, needed)


@pytest.mark.everything
def test_memory_of_large_tensors_is_kept() -> None:
    """Ten tensors of 64 MiB one after the other: pages are taken from the kernel once."""
    program = """
import resource, sys
import torch
from megatron_epp.runtime.malloc_trim import keep_large_blocks

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
before = faults()
if not keep_large_blocks():
    print("no glibc")
    raise SystemExit
faults()
after = faults()
print(before, after)
assert after < before / 5
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_library_without_a_trim_is_left_alone(monkeypatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    heap = HostHeap(1, iter((0, 0, 100)).__next__)
    heap.begin()
    assert not heap.settle()


def test_holes_go_back_to_the_host() -> None:
    """Blocks below glibc's threshold for mappings of their own, every other one freed."""
    program = """
import ctypes
from megatron_epp.runtime.malloc_trim import HostHeap, _resident_bytes

libc = ctypes.CDLL(None)
if not hasattr(libc, "malloc_trim"):
    print("no glibc")
    raise SystemExit
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
resident, size, count = _resident_bytes(), 100_000, 8000
heap = HostHeap(step_bytes=1)
before = resident()
blocks = [libc.malloc(size) for _ in range(count)]
for block in blocks:
    ctypes.memset(block, 1, size)
full = resident()
for block in blocks[::2]:
    libc.free(block)
holes = resident()
heap.begin()
assert heap.settle()
print(full - before, holes - before, resident() - before)
assert resident() - before < 0.6 * (holes - before)
assert not heap.settle()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
