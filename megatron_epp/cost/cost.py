"""The cost of any plan on one machine: a profile, spread over stages and devices.

    seconds[s, c] = seconds_per(kind)[s] . (tokens[c], pairs[c], 1)

The sums are InfiniPipe's eqs 1 to 10 with these corrections: K, V and their gradients are charged
to cut documents only, once for all that later slices attend to (the rule table says from when to
when); a backward frees layer by layer while it makes gradients and recomputes; logits live on the
last stage; eq. 11's share of a recomputed layer is one layer's forward; a gather per
chunk costs time under ZeRO 3 only.

What a layer saved and OFFLOAD puts aside is copied to the host's memory while F runs and back while
B or I runs, a layer at a time, both ways at once:

    seconds[s, c] = max(seconds without copies, offloaded[s, c] * saved_bytes[c] / host rate)

which wants the offloaded layers spread among the others (ir.recompute.offload_among). Two of them
at most are on the device at a time, one in use and one under way, as in Transformer Engine's
CPU offloading: all the op long, since a copy back begins before its layer's turn. What the host's
memory holds is counted apart (cost.host_memory), and a copy that an op has to wait for counts as
communication.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron_epp.cost.analytic import budgeted
from megatron_epp.cost.analytic import profile as analytic_profile
from megatron_epp.cost.devices import GIB, device
from megatron_epp.cost.loads import Loads, loads_of
from megatron_epp.cost.models import model
from megatron_epp.cost.profile import Bytes, Profile, Seconds, Workspace
from megatron_epp.cost.published import PUBLISHED
from megatron_epp.ir import (
    BACKWARDS,
    COMPUTE,
    FULL,
    KEEP,
    OFFLOAD,
    SELECTIVE,
    Chunk,
    Item,
    Kind,
    Payload,
    Plan,
    Table,
    slices_of,
)

IN_FLIGHT = 2  # offloaded layers on the device while an op runs


@dataclass(frozen=True)  # no slots: its arrays are computed once, when first asked for
class Cost:
    """Seconds and bytes of chunks on the stages of one replica; bytes are per device.

    profile        one layer's, and the ends'
    layers         of every stage, first to last
    budget_bytes   of every stage, by device: all that training holds, states included
    tp, cp, dp     tensor- and context-parallel degrees of a stage, and replicas
    zero           1: weights stay on every device (Megatron's distributed optimizer);
                   3: states are spread over the stage's devices, layers gathered for every chunk
    host_budget_bytes   of the host's memory, for what one device offloads
    """

    profile: Profile
    layers: tuple[int, ...]
    budget_bytes: tuple[float, ...]
    tp: int = 1
    cp: int = 1
    dp: int = 1
    zero: int = 1
    host_budget_bytes: float = math.inf

    def __post_init__(self):
        if not self.layers or min(self.layers) < 0:
            raise ValueError(f"layers {self.layers}: expected a number of layers for every stage")
        if len(self.budget_bytes) != len(self.layers):
            raise ValueError(
                f"{len(self.budget_bytes)} memory budgets for {len(self.layers)} stages"
            )
        for name in ("tp", "cp", "dp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: expected at least 1")
        if self.zero not in (1, 3):
            raise ValueError(f"zero {self.zero}: expected 1 or 3")

    @property
    def stages(self) -> int:
        return len(self.layers)

    @property
    def devices(self) -> int:
        """Of one replica."""
        return self.stages * self.tp * self.cp

    @cached_property
    def spread(self) -> float:
        """What a figure of the profile is divided by: this layout's devices over the profile's."""
        return self.tp * self.cp / (self.profile.tp * self.profile.cp)

    @cached_property
    def states_bytes(self) -> tuple[float, ...]:
        """Of every stage, on one device: weights, gradients, optimizer, gather buffers."""
        return tuple(map(float, self._states_bytes()))

    def _states_bytes(self) -> np.ndarray:
        profile, states = self.profile, self.profile.states
        parameters = np.array(self.layers, float) * profile.layer_parameters
        parameters[0] += profile.first_parameters
        parameters[-1] += profile.last_parameters
        parameters /= self.tp
        sharded = parameters / (self.cp * self.dp)
        if self.zero == 1:
            return np.ceil(states.zero1_resident * parameters + states.zero1_sharded * sharded)
        gathered = np.minimum(self.layers, states.zero3_layers) * profile.layer_parameters / self.tp
        return np.ceil(states.zero3_sharded * sharded + states.zero3_gathered * gathered)

    def require_states_fit(self) -> None:
        """A ValueError that says what would be needed, where a stage's states exceed its budget."""
        for stage, (states, budget) in enumerate(
            zip(self.states_bytes, self.budget_bytes, strict=True)
        ):
            if states >= budget:
                raise ValueError(
                    f"memory budget {budget / GIB:.4g} GiB: stage {stage} needs more than "
                    f"{states / GIB:.4g} GiB for its model states alone; raise the budget, or use "
                    "more stages or devices"
                )

    # --- seconds ---------------------------------------------------------------------------------

    def seconds_per(self, kind: Kind) -> np.ndarray:
        """[stages, 3]: seconds of ``kind`` per token, per query-key pair and per chunk; B and I
        without recompute, exposed communication included."""
        return self._seconds[kind] + self._comm[kind]

    def comm_seconds_per(self, kind: Kind) -> np.ndarray:
        """[stages, 3]: the communication inside :meth:`seconds_per`."""
        return self._comm[kind]

    @cached_property
    def _seconds(self) -> Mapping[Kind, np.ndarray]:
        """Computation only."""
        result = {}
        for kind in COMPUTE:
            per = np.outer(self.layers, self._row(self.profile.layer_seconds[kind]))
            per[0] += self._row(self.profile.first_seconds[kind])
            per[-1] += self._row(self.profile.last_seconds[kind])
            result[kind] = per
        return result

    @cached_property
    def _comm(self) -> Mapping[Kind, np.ndarray]:
        exchanged = self._all_to_all + self._tensor
        result = {}
        for kind in COMPUTE:
            layer = np.zeros(3)
            if kind is not Kind.WEIGHT:
                layer[0] = exchanged
            if self.zero == 3:
                layer[2] = self.profile.gather_seconds[kind]
            result[kind] = np.outer(self.layers, layer)
        return result

    def _row(self, seconds: Seconds) -> np.ndarray:
        # What a chunk costs whatever its size, launching kernels above all, is not spread.
        return np.array(
            [seconds.per_token / self.spread, seconds.per_pair / self.spread, seconds.per_chunk]
        )

    @cached_property
    def _all_to_all(self) -> float:
        """Seconds per token of one layer's forward: eq. 3."""
        if self.cp == 1:
            return 0.0
        rate = _rate(self.profile.all_to_all_bytes_per_second, self.cp)
        return self.profile.all_to_all_bytes_per_token / (self.cp * self.tp * rate)

    @cached_property
    def _tensor(self) -> float:
        """Seconds per token of one layer's forward: gathers and scatters inside a TP group."""
        if self.tp == 1:
            return 0.0
        rate = _rate(self.profile.tensor_bytes_per_second, self.tp)
        moved = self.profile.tensor_bytes_per_token * (self.tp - 1) / self.tp
        return moved / (self.cp * rate)

    def recompute_seconds_per(self, letter: str) -> np.ndarray:
        """[3]: seconds that one layer with the choice ``letter`` adds to B or I."""
        if letter == OFFLOAD:
            return np.zeros(3)
        row = self._row(self.profile.recompute_seconds[letter])
        modules = SELECTIVE.get(letter, ())
        if letter == FULL:
            row[0] += self._all_to_all + self._tensor
        elif "core_attn" in modules:
            row[0] += self._all_to_all
        elif "mlp" in modules:
            row[0] += self._tensor / 2
        return row

    def seconds(self, kind: Kind, loads: Loads) -> np.ndarray:
        """[stages, chunks]: alone, without recompute."""
        return self.seconds_per(kind) @ _features(loads)

    def comm_seconds(self, kind: Kind, loads: Loads) -> np.ndarray:
        """[stages, chunks]: exposed communication inside :meth:`seconds`."""
        return self.comm_seconds_per(kind) @ _features(loads)

    def compute_seconds(self, kind: Kind, loads: Loads) -> np.ndarray:
        """[stages, chunks]: without recompute and without communication, for lower bounds."""
        return self._seconds[kind] @ _features(loads)

    def recompute_seconds(self, letter: str, loads: Loads) -> np.ndarray:
        """[chunks]: of one layer."""
        return self.recompute_seconds_per(letter) @ _features(loads)

    def copy_seconds(self, loads: Loads) -> np.ndarray:
        """[chunks]: of what one layer saved, to the host's memory or back."""
        rate = self.profile.host_bytes_per_second
        if not rate:
            raise ValueError(
                f"the plan offloads layers (choice {OFFLOAD}), but the cost model of "
                f"{self.profile.provenance.device} has no rate to the host's memory "
                "(host_bytes_per_second is 0): plan without the lever offload, or give that rate"
            )
        return self.saved_bytes(KEEP, loads) / rate

    def link_seconds(self, loads: Loads) -> np.ndarray:
        """[chunks]: that a message of the chunk occupies a link between stages."""
        return self.profile.link_seconds_per_token * loads.tokens

    # --- bytes -----------------------------------------------------------------------------------

    def _bytes(self, per: Bytes, loads: Loads) -> np.ndarray:
        """[chunks] on one device."""
        kept = loads.kept_tokens(self.profile.keeps_last)
        return (per.per_token * (loads.tokens - kept) + per.per_cut_token * kept) / self.spread

    def saved_bytes(self, letter: str, loads: Loads) -> np.ndarray:
        """[chunks]: what one layer holds from F to B, K and V that later slices attend to apart."""
        if letter == OFFLOAD:
            return np.zeros(loads.chunks)
        return self._bytes(self.profile.saved_bytes[letter], loads)

    def end_bytes(self, loads: Loads) -> np.ndarray:
        """[stages, chunks]: what the first and the last stage hold besides from F to B."""
        held = self._last_bytes(loads)
        held[0] += self._bytes(self.profile.first_bytes, loads)
        return held

    def _last_bytes(self, loads: Loads) -> np.ndarray:
        held = np.zeros((self.stages, loads.chunks))
        held[-1] += self._bytes(self.profile.last_bytes, loads)
        return held

    def activation_bytes(self, loads: Loads, counts: Mapping[str, np.ndarray]) -> np.ndarray:
        """[stages, chunks]: from F to B; counts[letter][stage, chunk] layers have that choice."""
        held = self.end_bytes(loads)
        for letter, count in counts.items():
            held += count * self.saved_bytes(letter, loads)
        return np.ceil(held)

    def kv_bytes(self, loads: Loads) -> np.ndarray:
        """[stages, documents]: the buffer of a cut document's K and V; 0 of whole documents."""
        kept = loads.context_tokens
        if self.profile.keeps_last:
            kept = np.where(kept > 0, loads.lengths, 0.0)
        layer = self.profile.kv_bytes_per_token * kept / self.spread
        return np.ceil(np.outer(self.layers, layer))

    def kv_gradient_bytes(self, loads: Loads) -> np.ndarray:
        """[stages, documents]: their gradients."""
        layer = self.profile.kv_gradient_bytes_per_token * loads.context_tokens / self.spread
        return np.ceil(np.outer(self.layers, layer))

    def weight_input_bytes(self, loads: Loads) -> np.ndarray:
        """[stages, chunks]: from I to W."""
        held = np.outer(self.layers, self._bytes(self.profile.weight_input_bytes, loads))
        held[-1] += self._bytes(self.profile.last_weight_input_bytes, loads)
        return np.ceil(held)

    def workspace_bytes(self, kind: Kind, loads: Loads) -> np.ndarray:
        """[stages, chunks]: while the op runs, without recompute."""
        everywhere = self.profile.workspace_bytes[kind]
        at_end = self.profile.last_workspace_bytes[kind]
        row = self._bytes(everywhere, loads) + self._besides(everywhere, loads)
        held = np.tile(row, (self.stages, 1))
        last = self._bytes(at_end, loads)
        if self.profile.last_workspace_tokens:
            most = self.profile.last_workspace_tokens
            last *= np.minimum(1.0, most / np.maximum(loads.tokens, 1.0))
        held[-1] += last + self._besides(at_end, loads)
        return np.ceil(held)

    def _besides(self, per: Workspace, loads: Loads) -> np.ndarray | float:
        """[chunks]: what an op needs whatever its chunk's tokens are. A weight's gradient, the most
        of what does not depend on the chunk, is spread over tensor-parallel ranks alone."""
        besides = per.per_op * self.profile.tp / self.tp
        if not per.per_context_token:
            return besides
        return besides + per.per_context_token * loads.behind_tokens / self.spread

    def recompute_workspace_bytes(self, letter: str, loads: Loads) -> np.ndarray:
        """[chunks]: of the layer that lives again while its B or I runs."""
        return np.ceil(self._bytes(self.profile.recompute_workspace_bytes[letter], loads))

    def backward_workspace_bytes(
        self,
        kind: Kind,
        loads: Loads,
        layers: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]],
    ) -> np.ndarray:
        """[stages, chunks]: peak of a B or I beyond all that its chunk holds from F to B, beyond
        the gradients of K and V that a last slice's makes, and beyond what I leaves for W. At
        most 0 where no layer is recomputed: what the last layer held is gone before the first
        makes its gradients, and I turns activations into weight inputs layer by layer.

        ``layers`` come in the order of backward: grids [stages, chunks] of how many layers, of
        bytes that each holds from F to B, and of bytes that live again while it is recomputed.
        """
        loose = (loads.document >= 0) & (loads.later < 0)
        context_C = np.where(loose, loads.context_tokens[np.maximum(loads.document, 0)], 0.0)
        made_C = self.profile.kv_gradient_bytes_per_token * context_C / self.spread
        held = -self._last_bytes(loads)  # the output layer's backward comes first
        made = np.zeros_like(held)
        if kind is Kind.INPUT:
            made_C = made_C + self._bytes(self.profile.weight_input_bytes, loads)
            made[-1] = self._bytes(self.profile.last_weight_input_bytes, loads)
        held += made
        peak = np.maximum(held, 0.0)
        for count, saved, again in layers:
            shrinks = saved - made_C
            most = again + np.maximum(held, held - (count - 1) * shrinks)
            held = held - count * shrinks
            peak = np.maximum(peak, np.where(count > 0, np.maximum(most, held), 0.0))
        return np.ceil(peak - made - np.outer(self.layers, made_C))

    # --- plans -----------------------------------------------------------------------------------

    def loads(self, chunks: Sequence[Chunk], documents: Sequence[int]) -> Loads:
        return loads_of(chunks, documents)

    def table(self, plan: Plan) -> Table:
        """Seconds and bytes of every op of ``plan``, as the simulator wants them."""
        loads = loads_of(plan.chunks, plan.documents, slices_of(plan))
        layers = list(self._layers_backward(plan, loads))
        return self._table(loads, letter_counts(plan), layers, plan.forward_only)

    def table_of(
        self, loads: Loads, counts: Mapping[str, np.ndarray], forward_only: bool = False
    ) -> Table:
        """As :meth:`table`, for planners: counts[letter][stage, chunk] layers have that choice.

        The layers of a stage are taken to stand in the order of ``counts``, kept ones last; those
        offloaded stand anywhere.
        """
        order = [letter for letter in counts if letter not in (KEEP, OFFLOAD)]
        order += [letter for letter in (KEEP, OFFLOAD) if letter in counts]
        shape = (self.stages, loads.chunks)
        layers = [
            (
                np.broadcast_to(counts[letter], shape),
                np.broadcast_to(self.saved_bytes(letter, loads), shape),
                np.broadcast_to(self._again_bytes(letter, loads), shape),
            )
            for letter in reversed(order)
        ]
        return self._table(loads, counts, layers, forward_only)

    def _again_bytes(self, letter: str, loads: Loads) -> np.ndarray:
        if letter in (KEEP, OFFLOAD):
            return np.zeros(loads.chunks)
        return self.recompute_workspace_bytes(letter, loads)

    def _layers_backward(
        self, plan: Plan, loads: Loads
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """One layer of every stage and chunk at a time, last layers first.

        But for offloaded ones, which come first and together, wherever they stand: they hold
        nothing, and the gradients and weight inputs that they make count from the start.
        """
        letters = sorted({letter for stage in plan.recompute for c in stage for letter in c})
        if not letters:  # no stage has a layer
            return
        saved = np.stack([self.saved_bytes(letter, loads) for letter in letters])
        again = np.stack([self._again_bytes(letter, loads) for letter in letters])
        number = {letter: index for index, letter in enumerate(letters)}
        chunk = np.arange(loads.chunks)
        offloaded = None
        if OFFLOAD in number:
            offloaded = letter_counts(plan)[OFFLOAD]
            nothing = np.zeros((self.stages, loads.chunks))
            yield offloaded, nothing, nothing
        for behind in range(max(self.layers)):
            which = np.zeros((self.stages, loads.chunks), np.int64)
            for stage, choices in enumerate(plan.recompute):
                if behind < self.layers[stage]:
                    which[stage] = [number[choice[-1 - behind]] for choice in choices]
            there = (behind < np.array(self.layers))[:, None] + np.zeros(loads.chunks)
            if offloaded is not None:
                there *= which != number[OFFLOAD]
            yield there, saved[which, chunk], again[which, chunk]

    def _table(
        self,
        loads: Loads,
        counts: Mapping[str, np.ndarray],
        layers: Sequence,
        forward_only: bool,
    ) -> Table:
        """A plan of forwards only keeps nothing: one layer's activations at a time, and the ends'
        while they run.
        """
        recompute = np.zeros((self.stages, loads.chunks))
        for letter, count in counts.items():
            if letter not in (KEEP, OFFLOAD):
                recompute += count * self.recompute_seconds(letter, loads)
        activations = self.activation_bytes(loads, counts)
        weight_inputs = self.weight_input_bytes(loads)
        workspace = {kind: self.workspace_bytes(kind, loads) for kind in COMPUTE}
        for kind in BACKWARDS:
            workspace[kind] += self.backward_workspace_bytes(kind, loads, layers)
        if forward_only:
            passing = self.end_bytes(loads) + self.saved_bytes(KEEP, loads)
            workspace[Kind.FORWARD] += np.ceil(passing)
        link = np.tile(self.link_seconds(loads), (max(0, self.stages - 1), 1))
        seconds = {kind: self.seconds(kind, loads) for kind in COMPUTE}
        comm = {kind: self.comm_seconds(kind, loads) for kind in COMPUTE}
        offloaded = counts.get(OFFLOAD)
        if offloaded is not None and not forward_only:
            copies = offloaded * self.copy_seconds(loads)
            layer = self.saved_bytes(KEEP, loads)
            # Of what I leaves for W, counted from its start, theirs is still to be made.
            besides = {Kind.INPUT: self._bytes(self.profile.weight_input_bytes, loads)}
            for kind in (Kind.FORWARD, *BACKWARDS):
                work = seconds[kind] + (recompute if kind in BACKWARDS else 0.0)
                exposed = np.maximum(copies - work, 0.0)
                seconds[kind] = seconds[kind] + exposed
                comm[kind] = comm[kind] + exposed
                more = np.maximum(layer - besides.get(kind, 0.0), 0.0)
                there = np.minimum(offloaded, IN_FLIGHT) * more
                workspace[kind] = workspace[kind] + np.ceil(there)
        return Table(
            seconds=seconds,
            recompute_seconds=recompute,
            comm_seconds=comm,
            link_seconds=dict.fromkeys(Payload, link),
            link_latency_seconds=self.profile.link_latency_seconds,
            held_bytes={
                Item.ACTIVATIONS: activations,
                Item.KV: self.kv_bytes(loads),
                Item.KV_GRADIENTS: self.kv_gradient_bytes(loads),
                Item.WEIGHT_INPUTS: weight_inputs,
            },
            workspace_bytes=workspace,
            resident_bytes=self.states_bytes,
        )


def _features(loads: Loads) -> np.ndarray:
    """[3, chunks]: tokens, pairs, 1."""
    return np.stack([loads.tokens, loads.pairs, np.ones(loads.chunks)])


def _rate(rates: Mapping[int, float], degree: int) -> float:
    """Bytes per second at ``degree``: the largest known degree up to it, or the smallest."""
    if not rates:
        raise ValueError(f"the profile has no bandwidth for groups of {degree}")
    return rates[max((known for known in rates if known <= degree), default=min(rates))]


def letter_counts(plan: Plan) -> dict[str, np.ndarray]:
    """counts[letter][stage, chunk]: layers of the stage with that recompute choice, 0 anywhere
    left out."""
    seen: dict[str, dict[str, int]] = {}
    counts: dict[str, np.ndarray] = {}
    for stage, choices in enumerate(plan.recompute):
        for chunk, choice in enumerate(choices):
            if choice not in seen:
                seen[choice] = {letter: choice.count(letter) for letter in set(choice)}
            for letter, count in seen[choice].items():
                if letter not in counts:
                    counts[letter] = np.zeros((plan.stages, len(plan.chunks)))
                counts[letter][stage, chunk] = count
    return counts


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """``layers`` over ``stages``; what is left over goes one each to the first stages, as the
    last one carries the output layer."""
    if not 1 <= stages <= layers:
        raise ValueError(f"pp {stages}: expected 1 to {layers}, the layers of the model")
    share, rest = divmod(layers, stages)
    return tuple(share + (stage < rest) for stage in range(stages))


def named_cost(
    model_name: str,
    device_name: str,
    *,
    pp: int,
    tp: int = 1,
    cp: int = 1,
    dp: int = 1,
    zero: int | None = None,
    memory_budget_gib: float | None = None,
    layers: Sequence[int] | None = None,
    profile: Profile | None = None,
    **assumptions: Any,
) -> Cost:
    """The cost of a model on devices, both by name or file.

    Defaults: the device's own budget; even layers; zero 3 for the GPT models of the papers, else
    1; an analytic profile, to which ``assumptions`` go (:func:`analytic.profile`).
    """
    the_model, the_device = model(model_name), device(device_name)
    if zero is None:
        zero = 3 if the_model.name in PUBLISHED else 1
    stage_layers = even_layers(the_model.layers, pp) if layers is None else tuple(layers)
    if len(stage_layers) != pp or sum(stage_layers) != the_model.layers:
        raise ValueError(
            f"layers {' '.join(map(str, stage_layers))}: expected {pp} numbers that add up to "
            f"{the_model.layers}"
        )
    if profile is None:
        profile = analytic_profile(the_model, the_device, **assumptions)
    budget = the_device.budget_bytes if memory_budget_gib is None else memory_budget_gib * GIB
    cost = Cost(budgeted(profile), stage_layers, (budget,) * pp, tp, cp, dp, zero)
    cost.require_states_fit()
    return cost
