"""Memory peak of a backward, which frees activations while it recomputes and makes gradients."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.layer_kinds import Choice, Counts
from megatron_epp.cost.loads import Loads
from megatron_epp.cost.memory import ChunkMemory
from megatron_epp.ir import KEEP, OFFLOAD, Kind, Plan


@dataclass(frozen=True, slots=True, eq=False)
class LayerRun:
    """Consecutive layers of one kind and recompute mode, for every stage and chunk.

    Attributes:
        count: [stages, chunks], number of layers.
        saved: [stages, chunks], bytes that each layer holds from F to B.
        again: [stages, chunks], additional bytes while a layer is recomputed.
        kind: [stages], index of the layer kind; arbitrary if ``count`` is 0 for the stage.
    """

    count: np.ndarray
    saved: np.ndarray
    again: np.ndarray
    kind: np.ndarray


class BackwardPeak:
    """Memory peak of op B or I of every chunk, as a function of the recomputed layers.

    Args:
        memory: memory model of the cost.
        kind: B or I.
        loads: loads of the chunks.
    """

    def __init__(self, memory: ChunkMemory, kind: Kind, loads: Loads):
        layout, loose = memory.layout, (loads.document >= 0) & (loads.later < 0)
        document = np.maximum(loads.document, 0)
        bytes_KC = [
            np.where(loose, memory.layer_kv_gradient_bytes(each, loads)[document], 0.0)
            for each in layout.coefficients
        ]
        held = -memory.ends.freed_bytes(loads)
        output_bytes = np.zeros_like(held)
        if kind is Kind.INPUT:
            bytes_KC = [
                bytes_C + memory.layer_weight_input_bytes(of, loads)
                for bytes_C, of in zip(bytes_KC, layout.coefficients, strict=True)
            ]
            output_bytes = memory.ends.weight_input_bytes(loads)
        self._held = held + output_bytes
        self._less = output_bytes, layout.over_stages(bytes_KC)
        self._by_kind = np.stack(bytes_KC)
        # Workspace of a layer when it runs, relative to the largest one: at most 0.
        works = [layout.workspace_of(of.workspace_bytes[kind], loads) for of in layout.coefficients]
        self._work_KSC = np.stack(works)[:, None] - layout.most_over_stages(works)
        self._stage = np.arange(layout.stages)

    def part(self, chunks: slice) -> "BackwardPeak":
        """Return the peaks of the given ``chunks`` alone."""
        part = copy.copy(self)
        part._held, part._by_kind = self._held[:, chunks], self._by_kind[:, chunks]
        part._less = self._less[0][:, chunks], self._less[1][:, chunks]
        part._work_KSC = self._work_KSC[..., chunks]
        return part

    def bytes_of(self, runs: Iterable[LayerRun]) -> np.ndarray:
        """Return the peak in bytes minus bytes that are counted elsewhere: [stages, chunks].

        The bytes counted elsewhere are those that the chunk holds from F to B, those that it holds
        from I to W, the K and V gradients that a last slice makes, and the largest workspace of a
        layer.

        Without recompute the result is at most 0: the last layer frees its activations before the
        first layer makes its gradients, and I replaces activations by weight inputs layer by layer.
        It is below 0 if the layer with the largest workspace is not the last layer.

        Args:
            runs: layers in the order of backward.
        """
        held = self._held
        before = np.maximum(held, 0.0)
        peak = np.full_like(held, -np.inf)
        for run in runs:
            shrinks, less = (
                run.saved - self._by_kind[run.kind],
                self._work_KSC[run.kind, self._stage],
            )
            most = run.again + np.maximum(held, held - (run.count - 1) * shrinks)
            most = np.where(np.isinf(peak), np.maximum(most, before), most)
            held = held - run.count * shrinks
            peak = np.where(run.count > 0, np.maximum(peak, np.maximum(most, held) + less), peak)
        peak = np.where(np.isinf(peak), before, peak)
        output_bytes, of_layers = self._less
        return np.ceil(peak - output_bytes - of_layers)


def runs_of_counts(memory: ChunkMemory, loads: Loads, counts: Counts) -> list[LayerRun]:
    """Return the layers of all stages and chunks as runs, last layers first.

    ``counts`` contains the number of layers by (kind, recompute mode): [stages, chunks]. Modes are
    assigned to the layers of a kind from its first layer on, in the order of its entries in
    ``counts``. Layers that save everything are last in their stage. The positions of offloaded
    layers do not change the result.
    """
    if memory.layout.kinds.number > 1:
        return list(_layer_by_layer(memory, loads, counts))
    shape = (memory.layout.stages, loads.chunks)
    kind = np.zeros(memory.layout.stages, np.int64)
    order = [choice for choice in counts if choice[1] not in (KEEP, OFFLOAD)]
    order += [choice for choice in ((0, KEEP), (0, OFFLOAD)) if choice in counts]
    return [
        LayerRun(
            np.broadcast_to(counts[choice], shape),
            np.broadcast_to(memory.saved_bytes(choice, loads), shape),
            np.broadcast_to(memory.recompute_workspace_bytes(choice, loads), shape),
            kind,
        )
        for choice in reversed(order)
    ]


def runs_of_plan(memory: ChunkMemory, plan: Plan, loads: Loads, counts: Counts) -> list[LayerRun]:
    """Return the runs of layers with the recompute modes of ``plan``: offloaded, then last first.

    Args:
        memory: memory model of the cost.
        plan: plan with the recompute modes.
        loads: loads of the plan's chunks.
        counts: [stages, chunks], number of layers of ``plan`` by (kind, recompute mode).
    """
    return list(_layers_of_plan(memory, plan, loads, counts)) if any(memory.layout.layers) else []


def _layers_of_plan(
    memory: ChunkMemory, plan: Plan, loads: Loads, counts: Counts
) -> Iterator[LayerRun]:
    """Yield all offloaded layers, then the other layers of every stage one by one, last first."""
    yield from _offloaded(memory, counts)
    choices = sorted(counts)
    saved = np.stack([memory.saved_bytes(choice, loads) for choice in choices])
    again = np.stack([memory.recompute_workspace_bytes(choice, loads) for choice in choices])
    number = {choice: index for index, choice in enumerate(choices)}
    offloaded = [number[choice] for choice in choices if choice[1] == OFFLOAD]
    chunk = np.arange(loads.chunks)
    kinds_SL = memory.layout.kinds.nth[0]
    for from_end in range(max(memory.layout.layers)):
        which = np.zeros((memory.layout.stages, loads.chunks), np.int64)
        for stage, texts in enumerate(plan.recompute):
            if from_end < memory.layout.layers[stage]:
                kind = int(kinds_SL[stage, from_end])
                which[stage] = [number[kind, text[-1 - from_end]] for text in texts]
        there = (from_end < np.array(memory.layout.layers))[:, None] + np.zeros(loads.chunks)
        there *= ~np.isin(which, offloaded)
        yield LayerRun(there, saved[which, chunk], again[which, chunk], kinds_SL[:, from_end])


def _offloaded(memory: ChunkMemory, counts: Counts) -> Iterator[LayerRun]:
    """Yield the offloaded layers of each kind as one run, before all other layers.

    Their place in a stage does not matter: they hold no bytes, and the gradients and weight inputs
    that they make are counted from the start of the op.
    """
    for (kind, mode), count in sorted(counts.items()):
        if mode == OFFLOAD:
            nothing = np.zeros(count.shape)
            yield LayerRun(count, nothing, nothing, np.full(memory.layout.stages, kind))


def _layer_by_layer(memory: ChunkMemory, loads: Loads, counts: Counts) -> Iterator[LayerRun]:
    """Yield all offloaded layers, then the other layers of every stage one by one, last first.

    The first layers of a kind have the mode of its first entry in ``counts``, and so on. Layers
    that save everything are last in the stage.
    """
    yield from _offloaded(memory, counts)
    number, chunk = memory.layout.kinds.number, np.arange(loads.chunks)
    shape = (memory.layout.stages, loads.chunks)
    # By kind: its choices in order, and the number of its layers up to each choice.
    choices: list[Sequence[Choice]] = []
    reach: list[list[np.ndarray]] = []
    for kind in range(number):
        chosen = [choice for choice in counts if choice[0] == kind]
        chosen = [choice for choice in chosen if choice[1] not in (KEEP, OFFLOAD)]
        choices.append([*chosen, (kind, KEEP)])
        ends = np.cumsum([np.broadcast_to(counts[choice], shape) for choice in chosen], axis=0)
        reach.append(list(ends))
        left = memory.layout.kinds.counts[kind][:, None] - counts.get((kind, OFFLOAD), 0.0)
        reach[kind].append(np.broadcast_to(left, shape))
    most = max(map(len, choices))
    saved = np.zeros((number, most, loads.chunks))
    again = np.zeros((number, most, loads.chunks))
    # [kinds, steps, stages, chunks]; infinite after the last step, where nothing is left.
    edges = np.full((number, most, *shape), np.inf)
    left_KSC = np.stack([ends[-1] for ends in reach])
    for kind in range(number):
        for step, choice in enumerate(choices[kind]):
            saved[kind, step] = memory.saved_bytes(choice, loads)
            again[kind, step] = memory.recompute_workspace_bytes(choice, loads)
            if step + 1 < len(choices[kind]):
                edges[kind, step] = reach[kind][step]
    kinds_SL, places_SL = memory.layout.kinds.nth
    stage = np.arange(memory.layout.stages)
    for from_end in range(max(memory.layout.layers)):
        kind_S, place_S = kinds_SL[:, from_end], places_SL[:, from_end]
        there = (kind_S >= 0)[:, None] & (place_S[:, None] < left_KSC[kind_S, stage])
        taken = (place_S[:, None] >= edges[kind_S, :, stage].transpose(1, 0, 2)).sum(axis=0)
        at = kind_S[:, None], taken, chunk
        yield LayerRun(there, saved[at], again[at], kind_S)
