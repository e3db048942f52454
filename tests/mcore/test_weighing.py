"""Bytes of a calibration on a GPU: an allocator's figures, taken apart again.

The arithmetic of torch's CUDA caching allocator, and a probe that allocates by known rules.

Only what memory_allocated() and its peak depend on: blocks are multiples of 512 bytes; a tensor of
more than 1 MiB takes the smallest free block that holds it, whole where 1 MiB or less would be left
over (c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize, kSmallSize, should_split); segments of 1 to
10 MiB are 20 MiB, larger ones multiples of 2 MiB. With ``expandable`` segments every block is cut
to size.
"""

from dataclasses import dataclass

import pytest
import torch

from megatron_epp.cost.catalogue.models import Model
from megatron_epp.cost.fitting.measured import workspaces
from megatron_epp.cost.fitting.readings import Readings
from megatron_epp.cost.kinds.layer import Layer, LayerShape
from megatron_epp.ir import FULL, KEEP, Kind
from megatron_epp.mcore.calibrate.measure import _measure_bytes, _measure_end_bytes
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


RULES = Rules()
PLAIN = Layer.of(Model("m", 1, 64, 176, 4, 2, 16, 1000), LayerShape())


def figures(expandable: bool, context: int = 131072, rules: Rules = RULES):
    probe, readings = MadeUpProbe(rules, expandable), Readings()
    _measure_bytes(probe, readings, context, PLAIN)
    _measure_end_bytes([probe], readings, context)
    return readings, *workspaces(readings.peaks, probe.head_tokens)


@pytest.mark.parametrize("expandable", [True, False])
def test_a_contexts_keys_are_seen_behind_a_weights_gradient(expandable) -> None:
    _, layer, _, _, _ = figures(expandable)
    assert layer[Kind.BACKWARD].per_context_token == pytest.approx(RULES.keys, rel=0.02)
    assert layer[Kind.FORWARD].per_context_token <= 0.05 * RULES.keys
    # Documents that are never cut have no context worth weighing.
    _, short, _, _, _ = figures(expandable, context=1500)
    assert short[Kind.BACKWARD].per_context_token == 0.0


@pytest.mark.parametrize("expandable", [True, False])
@pytest.mark.parametrize("weight", [0, 172 * MIB, 1002 * MIB])
def test_no_op_needs_more_than_is_promised(expandable, weight) -> None:
    """Of chunks that were not weighed, beyond the largest weighed ones, too; and hardly less than
    twice the constants is promised for nothing."""
    rules = Rules(weight=weight)
    _, layer, last, again, forward = figures(expandable, rules=rules)
    for shape in (
        Shape(512), Shape(3000), Shape(5000), Shape(32768), Shape(1024, 98304), Shape(8192, 122880)
    ):  # fmt: skip
        probe = MadeUpProbe(rules, expandable)
        probe.layers(shape, KEEP)
        for letter in (KEEP, FULL):
            measured = probe.layers(shape, letter)
            for kind, needed in (
                (Kind.FORWARD, measured.forward_bytes),
                (Kind.BACKWARD, measured.backward_bytes),
            ):
                figure = layer[kind]
                if kind is Kind.FORWARD:
                    figure = forward.get(letter, figure)
                promised = figure.per_op + figure.per_token * shape.tokens
                promised += figure.per_context_token * shape.context
                if kind is Kind.BACKWARD:
                    promised += again[letter].per_token * shape.tokens
                slack = 12 * MIB  # of tensors that may occupy 1 MiB too much
                assert needed <= promised + slack, (shape, letter, kind)
                if weight < 200 * MIB:  # less than what 8192 tokens need
                    assert promised <= 1.1 * needed + 2 * weight + slack, (shape, letter, kind)
        end = probe.ends(shape)
        figure = last[Kind.FORWARD]
        promised = figure.per_op + figure.per_token * min(shape.tokens, probe.head_tokens)
        whole = layer[Kind.FORWARD]
        promised += whole.per_op + whole.per_token * shape.tokens
        assert end.forward_bytes <= promised + slack
        if shape.tokens <= probe.head_tokens:
            assert promised <= 1.1 * end.forward_bytes + 16 * MIB, shape


def test_a_chunk_between_the_borders_of_buckets_has_what_it_needs() -> None:
    """cuDNN's workspace is of 16384 tokens from 8193 on: at borders alone nobody would see it."""
    rules = Rules(buckets=True, weight=0)
    figure = figures(expandable=True, rules=rules)[1][Kind.BACKWARD]
    for tokens in (1025, 2049, 3000, 6000, 8193, 9000, 12000, 16385, 24000):
        probe = MadeUpProbe(rules, expandable=True)
        probe.layers(Shape(tokens), KEEP)
        needed = probe.layers(Shape(tokens), KEEP).backward_bytes
        promised = figure.per_op + figure.per_token * tokens
        assert needed <= 1.01 * promised, tokens
        assert promised <= needed + rules.attention * 2 * (tokens + 1024), tokens


def test_what_the_first_call_leaves_is_no_chunks() -> None:
    """A library's 32 MiB come with the first kernel and stay: weighed with a chunk of 256 tokens
    they would be 128 KiB for every token that it holds."""
    readings, *_ = figures(expandable=True)
    for sample in readings.held:
        if sample.choice == KEEP:
            assert sample.value == pytest.approx(RULES.saved * sample.tokens, rel=0.001)


def test_a_recomputed_layers_forward_is_weighed_by_itself() -> None:
    """By letter, where it differs from a kept layer's; of what was not weighed nothing is said."""
    _, layer, _, _, forward = figures(expandable=True)
    assert set(forward) == {FULL}
    assert forward[FULL].per_token == pytest.approx(RULES.passing + RULES.again, rel=0.02)
    assert layer[Kind.FORWARD].per_token == pytest.approx(RULES.passing, rel=0.02)
    assert workspaces([], 0)[3] == {}
