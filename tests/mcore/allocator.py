"""The arithmetic of torch's CUDA caching allocator, and a probe that allocates by known rules.

Only what memory_allocated() and its peak depend on: blocks are multiples of 512 bytes; a tensor of
more than 1 MiB takes the smallest free block that holds it, whole where 1 MiB or less would be left
over (c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize, kSmallSize, should_split); segments of 1 to
10 MiB are 20 MiB, larger ones multiples of 2 MiB. With ``expandable`` segments every block is cut
to size.
"""

from dataclasses import dataclass

import torch

from megatron_epp.mcore.calibrate.probe import Measurement, Shape

MIB = 2**20


class Allocator:
    def __init__(self, expandable: bool):
        self.expandable = expandable
        self.now = self.peak = 0
        self._free: list[int] = []

    def take(self, size: int) -> int:
        """The block that a tensor of ``size`` bytes gets."""
        size = max(512, -(-size // 512) * 512)
        if size > MIB and not self.expandable:
            fitting = sorted(block for block in self._free if block >= size)
            if fitting:
                self._free.remove(fitting[0])
                block = fitting[0]
            else:
                block = 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            if block - size > MIB:
                self._free.append(block - size)
                block = size
            size = block
        self.now += size
        self.peak = max(self.peak, self.now)
        return size

    def give(self, block: int):
        self.now -= block
        if block > MIB:
            self._free.append(block)


@dataclass(frozen=True)
class Rules:
    """What a layer and an end allocate: bytes per token, per context token, and at all."""

    saved: int = 200 * 1024  # in ten tensors
    passing: int = 16 * 1024  # while F runs
    weight: int = 172 * MIB  # a weight's gradient, while B runs
    attention: int = 24 * 1024  # while B runs, of at least 1024 tokens
    buckets: bool = False  # of attention: twice as many tokens each, from 1024 on
    keys: int = 36 * 1024  # per token of context and of the chunk, while B runs
    again: int = 220 * 1024  # a layer that lives again
    logits: int = 6 * 32_000  # of a block of the head's tokens, while F runs
    head_weight: int = 250 * MIB
    kernels: int = 32 * MIB  # with the first call, for ever


class MadeUpProbe:
    """A stage with both ends, as far as its bytes are asked for."""

    first, last, head_tokens = False, True, 4096
    device = torch.device("cuda")  # a name: nothing touches it

    def __init__(self, rules: Rules, expandable: bool):
        self.rules, self.allocator = rules, Allocator(expandable)
        self.called = False

    def most_context(self, share: float) -> int:
        return 65536

    def layers(self, shape: Shape, letters: str, weigh: bool = False) -> Measurement:
        rules, tokens = self.rules, shape.tokens
        keys = rules.keys * (tokens + shape.context)
        rows = max(1024, tokens)
        if rules.buckets:
            rows = 1 << (rows - 1).bit_length()
        attention = rules.attention * rows + keys
        again = rules.again * tokens if letters != "k" else 0
        saved = [4096 * tokens] if letters == "f" else [rules.saved // 10 * tokens] * 10
        # What a recomputed layer does not save lives all the same while its forward runs.
        passing = rules.passing * tokens + (again if letters == "f" else 0)
        return self._pass(saved, passing, (rules.weight, attention), again)

    def ends(self, shape: Shape, weigh: bool = False) -> Measurement:
        rules, block = self.rules, min(shape.tokens, self.head_tokens)
        forward = rules.logits * block + rules.head_weight
        return self._pass([8192 * shape.tokens], forward, (0,), 0)

    def _pass(
        self, saved: list[int], forward: int, backward: tuple[int, ...], again: int
    ) -> Measurement:
        memory = self.allocator
        memory.peak = base = memory.now
        if not self.called:
            self.called = True
            memory.take(self.rules.kernels)
        blocks = [memory.take(size) for size in saved]
        memory.give(memory.take(forward))
        held, forward_peak = memory.now - base, memory.peak - base
        memory.peak = memory.now
        lives = memory.take(again)
        for size in backward:
            memory.give(memory.take(size))
        memory.give(lives)
        for block in blocks:
            memory.give(block)
        return Measurement(
            0.0, 0.0, held, forward_peak - held, memory.peak - base - held
        )  # fmt: skip
