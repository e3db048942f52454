"""The heap is trimmed once for so many bytes that a process has grown by; holes go back."""

import subprocess
import sys

import pytest

from megatron_epp.runtime.malloc_trim import HostHeap


class Host:
    """A process with ``resident`` bytes, of which ``in_use`` cannot be given back."""

    def __init__(self):
        self.resident = self.in_use = 100
        self.trims = 0

    def trim(self):
        self.resident, self.trims = self.in_use, self.trims + 1

    def heap(self, step_bytes: int) -> HostHeap:
        return HostHeap(step_bytes, lambda: self.resident, self.trim)


def test_nothing_is_trimmed_before_the_process_has_grown_by_a_step() -> None:
    host = Host()
    heap = host.heap(50)
    host.resident = 149
    assert not heap.settle() and host.trims == 0
    host.resident = 150
    assert heap.settle() and host.trims == 1 and host.resident == 100


def test_what_is_in_use_after_a_trim_is_what_the_next_step_counts_from() -> None:
    host = Host()
    heap = host.heap(50)
    host.resident = host.in_use = 170
    assert heap.settle()
    host.resident = 219
    assert not heap.settle()
    host.resident, host.in_use = 220, 20  # used and freed again: holes
    assert heap.settle() and host.resident == 20
    host.resident = host.in_use = 69
    assert not heap.settle()


@pytest.mark.parametrize("steps", [[30, -30] * 20, [10] * 30, [60, -60, 5] * 10])
def test_never_more_than_a_step_beyond_what_was_in_use_at_once(steps) -> None:
    """At the worst: nothing that is freed is ever used again."""
    host = Host()
    heap = host.heap(50)
    most = host.in_use
    for step in steps:
        host.in_use += step
        host.resident += max(0, step)
        most = max(most, host.in_use)
        heap.settle()
        assert host.resident < most + 50


def test_a_library_without_a_trim_is_left_alone(monkeypatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    heap = HostHeap(1, iter((0, 100)).__next__)
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
resident, size, count = _resident_bytes(), 100_000, 2000
heap = HostHeap(step_bytes=size * count // 2)
before = resident()
blocks = [libc.malloc(size) for _ in range(count)]
for block in blocks:
    ctypes.memset(block, 1, size)
full = resident()
for block in blocks[::2]:
    libc.free(block)
holes = resident()
assert heap.settle()
print(full - before, holes - before, resident() - before)
assert resident() - before < 0.6 * (holes - before)
assert not heap.settle()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
