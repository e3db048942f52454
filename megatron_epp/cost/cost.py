"""The cost of any plan on one machine: a profile, spread over stages and devices.

    seconds[s, c] = seconds_per(kind)[s] . (tokens[c], pairs[c], 1)

Of a chunk of which context-parallel ranks compute some documents alone, tokens and pairs are those
that the slowest rank makes of it (:class:`~megatron_epp.cost.loads.Loads`), and only what is spread
over the ranks is exchanged.

Where the model has layers of several kinds, a stage is the sum over its layers, and there may be
further features: pairs of a window, tokens of context (:meth:`Cost.features`).

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

Vocabulary parallelism takes the output layer from the last stage's F and B and gives every stage a
part of it, H and G. Of the three products that it takes without (logits, the gradients of the input
and of the weight) H does the first two, G the first again and the third, all for 1/stages of the
words:

    seconds[H] = seconds[G] = 2/3 of (last_seconds[F] + last_seconds[B]) / stages

so a profile's figures serve, measured or analytic, with the early head or without, whose F + B are
the three products in either case; where it has H and G themselves (head_seconds), these. What a
chunk costs whatever its size is not spread. Sources: arXiv 2411.05288 (algorithm 2, whose two
passes these are); that the logits are made twice is ours.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import gcd
from typing import Any

import numpy as np

from megatron_epp.cost.analytic import (
    ELEMENT_BYTES,
    HEAD_BLOCK_TOKENS,
    budgeted,
    head_block_tokens,
)
from megatron_epp.cost.analytic import profile as analytic_profile
from megatron_epp.cost.devices import GIB, device
from megatron_epp.cost.layer_kinds import (
    Choice,
    Counts,
    StageKinds,
    format_kinds,
    split_choice,
    stage_kinds,
)
from megatron_epp.cost.loads import Loads, loads_of, pairs_before
from megatron_epp.cost.models import model
from megatron_epp.cost.network.topology import FLAT, Network, Topology, at_most
from megatron_epp.cost.network.topology import topology as find_topology
from megatron_epp.cost.profile import Bytes, LayerFigures, Profile, Seconds, Workspace
from megatron_epp.cost.published import PUBLISHED
from megatron_epp.ir import (
    BACKWARDS,
    FULL,
    KEEP,
    OF_HEAD,
    OF_LAYERS,
    OFFLOAD,
    SELECTIVE,
    Chunk,
    Item,
    Kind,
    Payload,
    Plan,
    Table,
    check_ranks,
    slices_of,
)

# Letters of layers whose MLP holds nothing from F to B, and lives again while B runs.
_WITHOUT_MLP = frozenset({FULL, *(a for a, modules in SELECTIVE.items() if "mlp" in modules)})
# Of what the output layer takes in forward and backward, without vocabulary parallelism: H, and G.
HEAD_SHARE = 2 / 3
IN_FLIGHT = 2  # offloaded layers on the device while an op runs


@dataclass(frozen=True)  # no slots: its arrays are computed once, when first asked for
class Cost:
    """Seconds and bytes of chunks on the stages of one replica; bytes are per device.

    profile        one layer's of every kind, and the ends'
    layers         of every stage, first to last
    budget_bytes   of every stage, by device: all that training holds, states included
    tp, cp, dp     tensor- and context-parallel degrees of a stage, and replicas
    zero           1: weights stay on every device (Megatron's distributed optimizer);
                   3: states are spread over the stage's devices, layers gathered for every chunk
    ep             devices that share the experts of a layer; more than tp x cp: those of several
                   replicas, which then run in lockstep
    layer_kinds    of all layers of the model, first to last, as the profile calls them; none: all
                   are of the profile's only kind
    host_budget_bytes   of the host's memory, for what one device offloads
    vocabulary_parallel  whether the output layer is cut over all stages (ops H and G)
    network        where groups lie and what they get there; none: the profile's rates by size
    """

    profile: Profile
    layers: tuple[int, ...]
    budget_bytes: tuple[float, ...]
    tp: int = 1
    cp: int = 1
    dp: int = 1
    zero: int = 1
    ep: int = 1
    layer_kinds: tuple[str, ...] = ()
    host_budget_bytes: float = math.inf
    network: Network | None = None
    vocabulary_parallel: bool = False

    def __post_init__(self):
        if self.vocabulary_parallel and len(self.layers) == 1:
            raise ValueError(
                "vocabulary parallelism cuts the output layer over the stages, and there is one; "
                "expected at least 2"
            )
        if not self.layers or min(self.layers) < 0:
            raise ValueError(f"layers {self.layers}: expected a number of layers for every stage")
        if len(self.budget_bytes) != len(self.layers):
            raise ValueError(
                f"{len(self.budget_bytes)} memory budgets for {len(self.layers)} stages"
            )
        for name in ("tp", "cp", "dp", "ep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: expected at least 1")
        if self.zero not in (1, 3):
            raise ValueError(f"zero {self.zero}: expected 1 or 3")
        self._require_kinds()

    def _require_kinds(self) -> None:
        known, given = self.profile.kinds, self.layer_kinds
        if not given:
            if len(known) > 1:
                raise ValueError(
                    f"the cost model has layers of the kinds {', '.join(known)}; expected the kind "
                    "of every layer"
                )
            return
        for kind in given:
            if kind not in known:
                raise ValueError(
                    f"layers of kind {kind!r}: the cost model knows {', '.join(known)}"
                )
        if len(given) != sum(self.layers):
            raise ValueError(
                f"kinds of layers {format_kinds(given)!r}: of {len(given)} layers, but the stages "
                f"have {sum(self.layers)}"
            )

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

    def with_vocabulary(self, parallel: bool) -> "Cost":
        """With the output layer cut over the stages, or on the last one alone."""
        if parallel == self.vocabulary_parallel:
            return self
        return dataclasses.replace(self, vocabulary_parallel=parallel)

    # --- kinds of layers -------------------------------------------------------------------------

    @cached_property
    def kinds(self) -> StageKinds:
        """Of every stage's layers. Kinds with the same figures are one: nothing tells them apart,
        and planners have fewer to choose among."""
        names = list(self.profile.kinds)
        figures = list(self.profile.kinds.values())
        plain = [_comparable(each) for each in figures]
        alike = [plain.index(each) for each in plain]
        known = {name: alike[number] for number, name in enumerate(names)}
        word = self.layer_kinds or (self.profile.layer_kind,) * sum(self.layers)
        return stage_kinds(names, [known[kind] for kind in word], self.layers)

    @cached_property
    def figures(self) -> tuple[LayerFigures, ...]:
        """Of the kinds of :attr:`kinds`."""
        known = self.profile.kinds
        return tuple(known[name] for name in self.kinds.names)

    @property
    def kinds_text(self) -> str:
        """The kinds of all layers, first to last, as in ``3*dense 58*experts``; nothing where all
        are alike."""
        return format_kinds(self.layer_kinds) if self.kinds.number > 1 else ""

    def _of(self, choice: Choice) -> tuple[LayerFigures, str]:
        """Whose figures a choice speaks of, and its letter."""
        kind, letter = split_choice(choice)
        assert len(self.figures) == 1 or not isinstance(choice, str), "of which kind?"
        return self.figures[kind], letter

    def over_stages(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """[stages, n]: the sum over all layers of a stage; ``rows``: of one layer, by kind."""
        total = np.outer(self.kinds.counts[0], rows[0])
        for count, row in zip(self.kinds.counts[1:], rows[1:], strict=True):
            total = total + np.outer(count, row)
        return total

    def _most_over_stages(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """[stages, n]: the most of any kind that a stage has; ``rows``: of one layer, by kind."""
        if len(rows) == 1:
            return np.tile(rows[0], (self.stages, 1))
        there = self.kinds.counts[:, :, None] > 0
        return np.where(there, np.stack(rows)[:, None, :], 0.0).max(axis=0)

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """Of the kinds of layers, narrowest first."""
        return tuple(sorted({each.window for each in self.figures} - {0}))

    @cached_property
    def _with_context(self) -> bool:
        return any(any(each.context_seconds.values()) for each in self.figures)

    def features(self, loads: Loads) -> np.ndarray:
        """[features, chunks]: what seconds are linear in. Tokens, pairs and 1; where kinds have
        windows, pairs by window, narrowest first; where they make something of their context again,
        tokens of context."""
        known = self.windows, self._with_context
        if known not in loads.features:
            rows = [loads.tokens, loads.pairs, np.ones(loads.chunks)]
            rows += [loads.window_pairs(window) for window in self.windows]
            if self._with_context:
                rows.append(loads.behind_tokens)
            loads.features[known] = np.stack(rows)
            loads.features[known].flags.writeable = False
        return loads.features[known]

    def whole_features(self, lengths: np.ndarray, chunks: float) -> np.ndarray:
        """[features] of whole documents of these lengths in ``chunks`` chunks."""
        lengths = np.asarray(lengths, dtype=np.float64)
        sums = [lengths.sum(), (lengths * (lengths + 1) / 2).sum(), chunks]
        sums += [pairs_before(lengths, window).sum() for window in self.windows]
        return np.array([*sums, 0.0] if self._with_context else sums)

    @property
    def window_columns(self) -> tuple[tuple[int, int], ...]:
        """(window, its place among the features)."""
        return tuple((window, 3 + at) for at, window in enumerate(self.windows))

    @property
    def context_column(self) -> int | None:
        """The place of the context's tokens among the features, if they are one."""
        return 3 + len(self.windows) if self._with_context else None

    # --- states ----------------------------------------------------------------------------------

    @cached_property
    def states_bytes(self) -> tuple[float, ...]:
        """Of every stage, on one device: weights, gradients, optimizer, gather buffers."""
        return tuple(map(float, self._states_bytes()))

    @property
    def room_bytes(self) -> np.ndarray:
        """[stages]: what the budget leaves beside states, for chunks."""
        return np.array(self.budget_bytes) - np.array(self.states_bytes)

    @cached_property
    def parameters(self) -> tuple[np.ndarray, np.ndarray]:
        """[stages] weights that a device holds under ZeRO 1: those spread over tensor-parallel
        ranks, and those of experts."""
        of_layers = [np.array([each.layer_parameters]) for each in self.figures]
        of_experts = [np.array([each.expert_parameters]) for each in self.figures]
        parameters = self.over_stages(of_layers)[:, 0]
        parameters[0] += self.profile.first_parameters
        if self.vocabulary_parallel:
            parameters += self.profile.last_parameters / self.stages
        else:
            parameters[-1] += self.profile.last_parameters
        return parameters / self.tp, self.over_stages(of_experts)[:, 0] / self.ep

    def _states_bytes(self) -> np.ndarray:
        states = self.profile.states
        of_layers = [np.array([each.layer_parameters]) for each in self.figures]
        of_experts = [np.array([each.expert_parameters]) for each in self.figures]
        parameters, experts = self.parameters
        # Optimizers are spread over all devices that hold the same weights.
        sharded = parameters / (self.cp * self.dp)
        sharded = sharded + experts * (self.ep / (self.tp * self.cp * self.dp))
        parameters = parameters + experts
        if self.zero == 1:
            return np.ceil(states.zero1_resident * parameters + states.zero1_sharded * sharded)
        largest = self._most_over_stages(
            [
                layers + experts * (self.tp / self.ep)
                for layers, experts in zip(of_layers, of_experts, strict=True)
            ]
        )[:, 0]
        gathered = np.minimum(self.layers, states.zero3_layers) * largest / self.tp
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
        """[stages, features]: seconds of ``kind`` per token, per query-key pair, per chunk, and of
        whatever else :meth:`features` tells; B and I without recompute, exposed communication
        included."""
        return self._seconds[kind] + self._comm[kind]

    def comm_seconds_per(self, kind: Kind) -> np.ndarray:
        """[stages, features]: the communication inside :meth:`seconds_per`."""
        return self._comm[kind]

    @cached_property
    def _seconds(self) -> Mapping[Kind, np.ndarray]:
        """Computation only."""
        result = {}
        for kind in OF_LAYERS:
            per = self.over_stages(
                [
                    self._row(each.layer_seconds[kind], each, each.context_seconds.get(kind, 0.0))
                    for each in self.figures
                ]
            )
            per[0] += self._row(self.profile.first_seconds[kind])
            if not self.vocabulary_parallel:
                per[-1] += self._row(self.profile.last_seconds[kind])
            result[kind] = per
        if self.vocabulary_parallel:
            result |= {kind: self._head_seconds(kind) for kind in OF_HEAD}
        return result

    def _head_seconds(self, kind: Kind) -> np.ndarray:
        """[stages, features] of H or G."""
        if kind in self.profile.head_seconds:
            each = self._row(self.profile.head_seconds[kind])
        else:
            whole = [self._row(self.profile.last_seconds[k]) for k in (Kind.FORWARD, Kind.BACKWARD)]
            each = HEAD_SHARE * (whole[0] + whole[1])
        launched = each[2]
        each = each / self.stages
        each[2] = launched
        return np.tile(each, (self.stages, 1))

    @cached_property
    def _comm(self) -> Mapping[Kind, np.ndarray]:
        result = {}
        for kind in OF_LAYERS:
            rows = []
            for each in self.figures:
                layer = np.zeros(self._width)
                if kind is not Kind.WEIGHT:
                    layer[0] = self._all_to_all(each) + self._tensor(each) + self._experts(each)
                if self.zero == 3:
                    layer[2] = each.gather_seconds[kind]
                rows.append(layer)
            result[kind] = self.over_stages(rows)
        if self.vocabulary_parallel:
            gathered = np.zeros((self.stages, self._width))
            gathered[:, 0] = self._gathered()
            result |= dict.fromkeys(OF_HEAD, gathered)
        return result

    @property
    def _width(self) -> int:
        return 3 + len(self.windows) + self._with_context

    def _row(
        self, seconds: Seconds, of: LayerFigures | None = None, context: float = 0.0
    ) -> np.ndarray:
        """[features]: of ``seconds``, whose pairs are those of the kind ``of``'s window."""
        # What a chunk costs whatever its size, launching kernels above all, is not spread.
        row = np.zeros(self._width)
        row[0], row[2] = seconds.per_token / self.spread, seconds.per_chunk
        column = 1 if of is None or not of.window else 3 + self.windows.index(of.window)
        row[column] = seconds.per_pair / self.spread
        if context:
            row[-1] = context / self.spread
        return row

    def _all_to_all(self, of: LayerFigures) -> float:
        """Seconds per token of one layer's forward: eq. 3."""
        if self.cp == 1 or not of.all_to_all_bytes_per_token:
            return 0.0
        if self.network is not None:
            rate = self.network.all_to_all(self.cp, self.tp)
        else:
            rate = at_most(self.profile.all_to_all_bytes_per_second, self.cp)
        return of.all_to_all_bytes_per_token / (self.cp * self.tp * rate)

    def _exchange(self, of: LayerFigures, kind: Kind) -> float:
        """Seconds per token of one layer's op that go to exchanging rows for heads, whether they
        were measured with the layer or not."""
        if self.cp == 1 or kind not in (Kind.FORWARD, *BACKWARDS):
            return 0.0
        measured = min(of.exchange_seconds.get(kind, 0.0), of.layer_seconds[kind].per_token)
        return self._all_to_all(of) + measured / self.spread

    @cached_property
    def exchange_per_token(self) -> Mapping[Kind, np.ndarray]:
        """[stages] by kind: seconds that go to exchanging rows for heads; rows of documents that
        one context-parallel rank computes alone do without."""
        return {
            kind: self.over_stages(
                [np.array([self._exchange(each, kind)]) for each in self.figures]
            )[:, 0]
            for kind in OF_LAYERS
        }

    def _unexchanged(self, per_token: np.ndarray, loads: Loads) -> np.ndarray | float:
        """[stages, chunks]: seconds that local documents do without; 0 where there are none."""
        if loads.local is None:
            return 0.0
        return np.outer(per_token, loads.local.tokens)

    def _tensor(self, of: LayerFigures) -> float:
        """Seconds per token of one layer's forward: gathers and scatters inside a TP group."""
        if self.tp == 1:
            return 0.0
        moved = of.tensor_bytes_per_token * (self.tp - 1) / self.tp
        return moved / (self.cp * self._tensor_rate())

    def _gathered(self) -> float:
        """Seconds per token of gathering the hidden state inside a TP group, whose ranks have
        other words each: H and G do so once each."""
        if self.tp == 1:
            return 0.0
        moved = self.hidden_bytes.per_token * (self.tp - 1) / self.tp
        return moved / (self.cp * self._tensor_rate())

    def _tensor_rate(self) -> float:
        if self.network is not None:
            return self.network.ring(self.tp)
        return at_most(self.profile.tensor_bytes_per_second, self.tp)

    def _experts(self, of: LayerFigures) -> float:
        """Seconds per token of one layer's forward: to the experts' devices and back."""
        if self.ep == 1 or not of.expert_bytes_per_token:
            return 0.0
        if self.network is not None:
            rate = self.network.all_to_all(self.ep)
        else:
            rate = at_most(self.profile.all_to_all_bytes_per_second, self.ep)
        moved = of.expert_bytes_per_token * (self.ep - 1) / self.ep
        return moved / (self.cp * self.tp * rate)

    def recompute_seconds_per(self, choice: Choice) -> np.ndarray:
        """[features]: seconds that one layer with that choice adds to B or I."""
        of, letter = self._of(choice)
        if letter == OFFLOAD:
            return np.zeros(self._width)
        modules = SELECTIVE.get(letter, ())
        attends = letter == FULL or "core_attn" in modules
        again = of.context_seconds.get(Kind.FORWARD, 0.0) if attends else 0.0
        row = self._row(of.recompute_seconds[letter], of, again)
        if letter == FULL:
            row[0] += self._all_to_all(of) + self._tensor(of) + self._experts(of)
        elif "core_attn" in modules or "mla_up_proj" in modules:
            row[0] += self._all_to_all(of)
        elif "mlp" in modules:
            row[0] += self._tensor(of) / 2 + self._experts(of)
        return row

    def seconds(self, kind: Kind, loads: Loads) -> np.ndarray:
        """[stages, chunks]: alone, without recompute."""
        taken = self.seconds_per(kind) @ self.features(loads)
        if kind in OF_HEAD:  # which exchanges no rows for heads
            return taken
        return taken - self._unexchanged(self.exchange_per_token[kind], loads)

    def comm_seconds(self, kind: Kind, loads: Loads) -> np.ndarray:
        """[stages, chunks]: exposed communication inside :meth:`seconds`."""
        exposed = self.comm_seconds_per(kind) @ self.features(loads)
        if loads.local is None or kind not in (Kind.FORWARD, *BACKWARDS):
            return exposed
        rows = [np.array([self._all_to_all(each)]) for each in self.figures]
        return exposed - self._unexchanged(self.over_stages(rows)[:, 0], loads)

    def compute_seconds(self, kind: Kind, loads: Loads) -> np.ndarray:
        """[stages, chunks]: without recompute and without communication, for lower bounds."""
        return self._seconds[kind] @ self.features(loads)

    def recompute_seconds(self, choice: Choice, loads: Loads) -> np.ndarray:
        """[chunks]: of one layer."""
        taken = self.recompute_seconds_per(choice) @ self.features(loads)
        if loads.local is None:
            return taken
        of, letter = self._of(choice)
        modules = SELECTIVE.get(letter, ())
        if letter == FULL or "core_attn" in modules or "mla_up_proj" in modules:
            taken = taken - self._exchange(of, Kind.FORWARD) * loads.local.tokens
        return taken

    def copy_seconds(self, loads: Loads, kind: int = 0) -> np.ndarray:
        """[chunks]: of what one layer of the kind saved, to the host's memory or back."""
        rate = self.profile.host_bytes_per_second
        if not rate:
            raise ValueError(
                f"the plan offloads layers (choice {OFFLOAD}), but the cost model of "
                f"{self.profile.provenance.device} has no rate to the host's memory "
                "(host_bytes_per_second is 0): plan without the lever offload, or give that rate"
            )
        return self.saved_bytes((kind, KEEP), loads) / rate

    def link_seconds(self, loads: Loads) -> np.ndarray:
        """[chunks]: that a message of the chunk occupies a link between stages."""
        return self.profile.link_seconds_per_token * loads.tokens

    def head_link_seconds(self, loads: Loads, forward_only: bool = False) -> np.ndarray:
        """[stages, chunks]: that a message of H occupies each link, the one from the last stage to
        the first in the last row. Between stages it carries the hidden state, and as large the
        weighted rows and the labels' rows; to the last stage, which has the hidden state, the rows
        alone. Without a backward nobody wants rows. Two statistics a token are not counted."""
        link = np.tile(self.link_seconds(loads), (self.stages, 1))
        link[:-2] *= 1 if forward_only else 3
        link[-2] *= 0 if forward_only else 2
        return link

    # --- bytes -----------------------------------------------------------------------------------

    def _bytes(self, per: Bytes, loads: Loads) -> np.ndarray:
        """[chunks] on one device."""
        keeps = self.profile.keeps_last
        loose, kept = loads.loose_tokens(keeps), loads.kept_tokens(keeps)
        return (per.per_token * loose + per.per_cut_token * kept) / self.spread

    def saved_bytes(self, choice: Choice, loads: Loads) -> np.ndarray:
        """[chunks]: what one layer holds from F to B, K and V that later slices attend to apart."""
        of, letter = self._of(choice)
        if letter == OFFLOAD:
            return np.zeros(loads.chunks)
        held = self._bytes(of.saved_bytes[letter], loads)
        if letter not in _WITHOUT_MLP and self._is_routed(of):
            held = held + self._routed(of, loads)
        return held

    def _routed(self, of: LayerFigures, loads: Loads) -> np.ndarray:
        """[chunks]: what one layer's experts hold beyond an even share, on the fullest device of
        those that share them. Counted among it is all that a recomputed MLP does not hold."""
        inside = self._bytes(of.saved_bytes[KEEP], loads) - self._bytes(of.saved_bytes["m"], loads)
        return (self.profile.routing - 1) * np.maximum(inside, 0.0)

    def _is_routed(self, of: LayerFigures) -> bool:
        """Whether more than an even share is known of what the kind's experts hold."""
        return self.profile.routing > 1 and self.ep > 1 and of.expert_parameters > 0

    def end_bytes(self, loads: Loads) -> np.ndarray:
        """[stages, chunks]: what the first and the last stage hold besides from F to B."""
        held = self._last_bytes(loads)
        held[0] += self._bytes(self.profile.first_bytes, loads)
        if self.vocabulary_parallel:
            # The model's output, then its gradient; where it was measured with an early head, what
            # that holds are the final norm's input and that gradient, as here.
            output = self._bytes(self.hidden_bytes, loads)
            if not self._holds_logits:
                output = np.maximum(output, self._bytes(self.profile.last_bytes, loads))
            held[-1] += output
        return held

    @property
    def _holds_logits(self) -> bool:
        """Whether logits are what the profile's last stage holds from F to B."""
        return self.profile.last_bytes.per_token > 0 and not self.profile.last_workspace_tokens

    def _last_bytes(self, loads: Loads) -> np.ndarray:
        held = np.zeros((self.stages, loads.chunks))
        if not self.vocabulary_parallel:
            held[-1] += self._bytes(self.profile.last_bytes, loads)
        return held

    @cached_property
    def hidden_bytes(self) -> Bytes:
        """Of the hidden state: what a layer that is recomputed in full holds is its input."""
        return min((each.saved_bytes[FULL] for each in self.figures), key=lambda b: b.per_token)

    def head_input_bytes(self, loads: Loads) -> np.ndarray:
        """[stages, chunks]: from H to G."""
        return np.ceil(np.tile(self._bytes(self.hidden_bytes, loads), (self.stages, 1)))

    def head_workspace_bytes(self, kind: Kind, loads: Loads) -> np.ndarray:
        """[stages, chunks]: while H or G runs. Logits of its part of the words, for a block of
        tokens at a time; H has rows besides, two a token as they come and as they go, G the
        gradient of its part of the weight."""
        profile = self.profile
        if kind in profile.head_workspace_bytes:
            held = self._workspace(profile.head_workspace_bytes[kind], loads) / self.stages
            return np.ceil(np.tile(held, (self.stages, 1)))
        at_end = profile.last_workspace_bytes[Kind.FORWARD]
        held = self._bytes(profile.last_bytes if self._holds_logits else at_end, loads)
        held = held / self.stages
        # A part of the words has blocks of as many tokens more, up to the largest.
        most = float(HEAD_BLOCK_TOKENS[0] * self.cp)
        if profile.last_workspace_tokens:
            most = min(most, profile.last_workspace_tokens * self.stages)
        held = held * np.minimum(1.0, most / np.maximum(loads.tokens, 1.0))
        held = held + self._besides(at_end, loads) / self.stages
        if kind is Kind.HEAD:
            held = held + 4 * self._bytes(self.hidden_bytes, loads)
        else:
            held = held + ELEMENT_BYTES * profile.last_parameters / (self.stages * self.tp)
        return np.ceil(np.tile(held, (self.stages, 1)))

    def activation_bytes(self, loads: Loads, counts: Counts) -> np.ndarray:
        """[stages, chunks]: from F to B; ``counts`` layers have each choice."""
        held = self.end_bytes(loads)
        for choice, count in self._known(counts).items():
            held += count * self.saved_bytes(choice, loads)
        return np.ceil(held)

    def _known(self, counts: Counts) -> Counts:
        """``counts`` by kind, where there are several."""
        return counts if self.kinds.number == 1 else self.kinds.by_kind(counts)

    def kv_spread(self, of: LayerFigures) -> float:
        """What bytes of K and V, or of latents, are divided by."""
        return 1.0 if of.kv_replicated else self.spread

    def kv_bytes(self, loads: Loads) -> np.ndarray:
        """[stages, documents]: the buffer of a cut document's K and V; 0 of whole documents."""
        rows = []
        for each in self.figures:
            kept = loads.tail_tokens(each.window)
            if self.profile.keeps_last and not each.window:
                kept = np.where(kept > 0, loads.lengths, 0.0)
            rows.append(each.kv_bytes_per_token * kept / self.kv_spread(each))
        return np.ceil(self.over_stages(rows))

    def kv_gradient_bytes(self, loads: Loads) -> np.ndarray:
        """[stages, documents]: their gradients."""
        rows = [self._kv_gradients(each, loads) for each in self.figures]
        return np.ceil(self.over_stages(rows))

    def _kv_gradients(self, of: LayerFigures, loads: Loads) -> np.ndarray:
        """[documents]: of one layer."""
        made = of.kv_gradient_bytes_per_token * loads.tail_tokens(of.window)
        return made / self.kv_spread(of)

    def weight_input_bytes(self, loads: Loads) -> np.ndarray:
        """[stages, chunks]: from I to W."""
        held = self.over_stages(
            [self._bytes(each.weight_input_bytes, loads) for each in self.figures]
        )
        if not self.vocabulary_parallel:
            held[-1] += self._bytes(self.profile.last_weight_input_bytes, loads)
        return np.ceil(held)

    def workspace_bytes(self, kind: Kind, loads: Loads) -> np.ndarray:
        """[stages, chunks]: while the op runs, without recompute."""
        rows = [self._workspace(each.workspace_bytes[kind], loads) for each in self.figures]
        return self._with_end(self._most_over_stages(rows), kind, loads)

    def _workspace(self, per: Workspace, loads: Loads) -> np.ndarray:
        """[chunks]"""
        return self._bytes(per, loads) + self._besides(per, loads)

    def _with_end(self, held: np.ndarray, kind: Kind, loads: Loads) -> np.ndarray:
        """``held`` [stages, chunks] with what the last stage needs besides."""
        if self.vocabulary_parallel:
            return np.ceil(held)
        at_end = self.profile.last_workspace_bytes[kind]
        last = self._bytes(at_end, loads)
        if self.profile.last_workspace_tokens:
            most = self.profile.last_workspace_tokens
            last *= np.minimum(1.0, most / np.maximum(loads.tokens, 1.0))
        held[-1] += last + self._besides(at_end, loads)
        return np.ceil(held)

    def forward_workspace_bytes(self, loads: Loads, counts: Counts) -> np.ndarray:
        """[stages, chunks]: while F runs, the most that a layer with one of the choices in use
        needs: a layer that is recomputed lives as long as its forward runs. A letter of which
        nothing is known needs what a kept layer does."""
        if not any(each.forward_workspace_bytes for each in self.figures):
            return self.workspace_bytes(Kind.FORWARD, loads)
        held = np.zeros((self.stages, loads.chunks))
        for choice, count in self._known(counts).items():
            of, letter = self._of(choice)
            per = of.forward_workspace_bytes.get(letter, of.workspace_bytes[Kind.FORWARD])
            most = self._workspace(per, loads)
            if letter in _WITHOUT_MLP and self._is_routed(of):
                most = most + self._routed(of, loads)
            held = np.maximum(held, np.where(count > 0, most, 0.0))
        return self._with_end(held, Kind.FORWARD, loads)

    def _besides(self, per: Workspace, loads: Loads) -> np.ndarray | float:
        """[chunks]: what an op needs whatever its chunk's tokens are. A weight's gradient, the most
        of what does not depend on the chunk, is spread over tensor-parallel ranks alone."""
        besides = per.per_op * self.profile.tp / self.tp
        if not per.per_context_token:
            return besides
        return besides + per.per_context_token * loads.behind_tokens / self.spread

    def recompute_workspace_bytes(self, choice: Choice, loads: Loads) -> np.ndarray:
        """[chunks]: of the layer that lives again while its B or I runs."""
        of, letter = self._of(choice)
        again = self._bytes(of.recompute_workspace_bytes[letter], loads)
        if letter in _WITHOUT_MLP and self._is_routed(of):
            again = again + self._routed(of, loads)
        return np.ceil(again)

    def backward_workspace_bytes(
        self, kind: Kind, loads: Loads, layers: Iterable["_Layers"]
    ) -> np.ndarray:
        """[stages, chunks]: peak of a B or I beyond all that its chunk holds from F to B, beyond
        the gradients of K and V that a last slice's makes, and beyond what I leaves for W. At
        most 0 where no layer is recomputed: what the last layer held is gone before the first
        makes its gradients, and I turns activations into weight inputs layer by layer.

        ``layers`` come in the order of backward.
        """
        loose = (loads.document >= 0) & (loads.later < 0)
        document = np.maximum(loads.document, 0)
        made_KC = [
            np.where(loose, self._kv_gradients(each, loads)[document], 0.0) for each in self.figures
        ]
        held = -self._last_bytes(loads)  # the output layer's backward comes first
        made = np.zeros_like(held)
        if kind is Kind.INPUT:
            made_KC = [
                made_C + self._bytes(each.weight_input_bytes, loads)
                for made_C, each in zip(made_KC, self.figures, strict=True)
            ]
            if not self.vocabulary_parallel:
                made[-1] = self._bytes(self.profile.last_weight_input_bytes, loads)
        held += made
        peak = np.maximum(held, 0.0)
        by_kind = made_KC[0] if len(made_KC) == 1 else np.stack(made_KC)
        for run in layers:
            count = run.count
            shrinks = run.saved - (by_kind if run.kind is None else by_kind[run.kind])
            most = run.again + np.maximum(held, held - (count - 1) * shrinks)
            held = held - count * shrinks
            peak = np.maximum(peak, np.where(count > 0, np.maximum(most, held), 0.0))
        return np.ceil(peak - made - self.over_stages(made_KC))

    # --- plans -----------------------------------------------------------------------------------

    def loads(self, chunks: Sequence[Chunk], documents: Sequence[int]) -> Loads:
        return loads_of(chunks, documents, ranks=self.cp)

    def table(self, plan: Plan) -> Table:
        """Seconds and bytes of every op of ``plan``, as the simulator wants them; with the output
        layer where the plan has it."""
        if plan.vocabulary_parallel != self.vocabulary_parallel:
            return self.with_vocabulary(plan.vocabulary_parallel).table(plan)
        check_ranks(plan, self.cp)
        loads = loads_of(plan.chunks, plan.documents, slices_of(plan), self.cp)
        several = self.kinds.number > 1
        counts: Counts = self.kinds.of_plan(plan) if several else letter_counts(plan)
        layers = list(self._layers_backward(plan, loads))
        return self._table(loads, counts, layers, plan.forward_only)

    def table_of(self, loads: Loads, counts: Counts, forward_only: bool = False) -> Table:
        """As :meth:`table`, for planners: ``counts`` [stages, chunks] layers have each choice.

        The layers of a stage, or those of each of its kinds where there are several, are taken to
        stand in the order of ``counts``, kept ones last; those offloaded stand anywhere.
        """
        if self.kinds.number > 1:
            counts = self.kinds.by_kind(counts)
            return self._table(loads, counts, list(self._mixed(loads, counts)), forward_only)
        order = [choice for choice in counts if choice not in (KEEP, OFFLOAD)]
        order += [letter for letter in (KEEP, OFFLOAD) if letter in counts]
        shape = (self.stages, loads.chunks)
        layers = [
            _Layers(
                np.broadcast_to(counts[letter], shape),
                np.broadcast_to(self.saved_bytes(letter, loads), shape),
                np.broadcast_to(self._again_bytes(letter, loads), shape),
            )
            for letter in reversed(order)
        ]
        return self._table(loads, counts, layers, forward_only)

    def _again_bytes(self, choice: Choice, loads: Loads) -> np.ndarray:
        if split_choice(choice)[1] in (KEEP, OFFLOAD):
            return np.zeros(loads.chunks)
        return self.recompute_workspace_bytes(choice, loads)

    def _offloaded(self, counts: Counts) -> Iterator["_Layers"]:
        """Offloaded layers come first and together, wherever they stand: they hold nothing, and the
        gradients and weight inputs that they make count from the start."""
        for choice, count in sorted(counts.items(), key=lambda item: split_choice(item[0])):
            kind, letter = split_choice(choice)
            if letter == OFFLOAD:
                nothing = np.zeros(count.shape)
                stages = np.full(self.stages, kind) if self.kinds.number > 1 else None
                yield _Layers(count, nothing, nothing, stages)

    def _mixed(self, loads: Loads, counts: Counts) -> Iterator["_Layers"]:
        """One layer of every stage and chunk at a time, last layers first, of stages whose layers
        are of several kinds. Those of a kind stand in the order of ``counts``, kept ones last."""
        yield from self._offloaded(counts)
        number, chunk = self.kinds.number, np.arange(loads.chunks)
        shape = (self.stages, loads.chunks)
        # Of every kind: its choices in order, and up to which of its layers each reaches.
        choices: list[list[Choice]] = []
        reach: list[list[np.ndarray]] = []
        for kind in range(number):
            mine = [choice for choice in counts if split_choice(choice)[0] == kind]
            mine = [choice for choice in mine if split_choice(choice)[1] not in (KEEP, OFFLOAD)]
            choices.append([*mine, (kind, KEEP)])
            ends = np.cumsum([np.broadcast_to(counts[choice], shape) for choice in mine], axis=0)
            reach.append(list(ends))
            aside = counts.get((kind, OFFLOAD))
            left = self.kinds.counts[kind][:, None] - (0.0 if aside is None else aside)
            reach[kind].append(np.broadcast_to(left, shape))
        most = max(map(len, choices))
        saved = np.zeros((number, most, loads.chunks))
        again = np.zeros((number, most, loads.chunks))
        # [K, steps, stages, chunks]; beyond the last step nothing is left: infinitely far.
        edges = np.full((number, most, *shape), np.inf)
        left_KSC = np.stack([ends[-1] for ends in reach])
        for kind in range(number):
            for step, choice in enumerate(choices[kind]):
                saved[kind, step] = self.saved_bytes(choice, loads)
                again[kind, step] = self._again_bytes(choice, loads)
                if step + 1 < len(choices[kind]):
                    edges[kind, step] = reach[kind][step]
        kinds_SL, places_SL = self.kinds.nth
        stage = np.arange(self.stages)
        for behind in range(max(self.layers)):
            kind_S, place_S = kinds_SL[:, behind], places_SL[:, behind]
            there = (kind_S >= 0)[:, None] & (place_S[:, None] < left_KSC[kind_S, stage])
            taken = (place_S[:, None] >= edges[kind_S, :, stage].transpose(1, 0, 2)).sum(axis=0)
            at = kind_S[:, None], taken, chunk
            yield _Layers(there, saved[at], again[at], kind_S)

    def _layers_backward(self, plan: Plan, loads: Loads) -> Iterator["_Layers"]:
        """One layer of every stage and chunk at a time, last layers first; see _offloaded."""
        if not any(self.layers):
            return
        several = self.kinds.number > 1
        counts: Counts = self.kinds.of_plan(plan) if several else letter_counts(plan)
        offloaded = list(self._offloaded(counts))
        yield from offloaded
        choices = sorted(counts)  # type: ignore[type-var]
        saved = np.stack([self.saved_bytes(choice, loads) for choice in choices])
        again = np.stack([self._again_bytes(choice, loads) for choice in choices])
        number = {choice: index for index, choice in enumerate(choices)}
        aside = [number[choice] for choice in choices if split_choice(choice)[1] == OFFLOAD]
        chunk = np.arange(loads.chunks)
        kinds_SL = self.kinds.nth[0] if several else None
        for behind in range(max(self.layers)):
            which = np.zeros((self.stages, loads.chunks), np.int64)
            for stage, texts in enumerate(plan.recompute):
                if behind < self.layers[stage]:
                    letters = [text[-1 - behind] for text in texts]
                    if several:
                        kind = int(kinds_SL[stage, behind])  # type: ignore[index]
                        which[stage] = [number[kind, letter] for letter in letters]
                    else:
                        which[stage] = [number[letter] for letter in letters]
            there = (behind < np.array(self.layers))[:, None] + np.zeros(loads.chunks)
            if offloaded:
                there *= ~np.isin(which, aside)
            of_kind = None if kinds_SL is None else kinds_SL[:, behind]
            yield _Layers(there, saved[which, chunk], again[which, chunk], of_kind)

    def _table(
        self,
        loads: Loads,
        counts: Counts,
        layers: Sequence["_Layers"],
        forward_only: bool,
    ) -> Table:
        """A plan of forwards only keeps nothing: one layer's activations at a time, and the ends'
        while they run.
        """
        if self.kinds.number > 1:  # sums come out alike, whoever counted
            counts = dict(sorted(counts.items(), key=lambda item: split_choice(item[0])))
        recompute = np.zeros((self.stages, loads.chunks))
        for choice, count in counts.items():
            if split_choice(choice)[1] not in (KEEP, OFFLOAD):
                recompute += count * self.recompute_seconds(choice, loads)
        activations = self.activation_bytes(loads, counts)
        weight_inputs = self.weight_input_bytes(loads)
        workspace = {kind: self.workspace_bytes(kind, loads) for kind in OF_LAYERS}
        workspace[Kind.FORWARD] = self.forward_workspace_bytes(loads, counts)
        for kind in BACKWARDS:
            workspace[kind] += self.backward_workspace_bytes(kind, loads, layers)
        if forward_only:
            one = [self.saved_bytes((kind, KEEP), loads) for kind in range(self.kinds.number)]
            workspace[Kind.FORWARD] += np.ceil(self.end_bytes(loads) + self._most_over_stages(one))
        link = np.tile(self.link_seconds(loads), (max(0, self.stages - 1), 1))
        links = {Payload.ACTIVATION: link, Payload.GRADIENT: link}
        held_bytes = {
            Item.ACTIVATIONS: activations,
            Item.KV: self.kv_bytes(loads),
            Item.KV_GRADIENTS: self.kv_gradient_bytes(loads),
            Item.WEIGHT_INPUTS: weight_inputs,
        }
        if self.vocabulary_parallel:
            links[Payload.HEAD] = self.head_link_seconds(loads, forward_only)
            held_bytes[Item.HEAD_INPUTS] = self.head_input_bytes(loads)
            workspace |= {kind: self.head_workspace_bytes(kind, loads) for kind in OF_HEAD}
        seconds = {kind: self.seconds(kind, loads) for kind in workspace}
        comm = {kind: self.comm_seconds(kind, loads) for kind in workspace}
        offloaded = {
            split_choice(choice)[0]: count
            for choice, count in counts.items()
            if split_choice(choice)[1] == OFFLOAD
        }
        if offloaded and not forward_only:
            copies = sum(
                count * self.copy_seconds(loads, kind) for kind, count in offloaded.items()
            )
            in_flight = np.minimum(np.sum(list(offloaded.values()), axis=0), IN_FLIGHT)
            for kind in (Kind.FORWARD, *BACKWARDS):
                work = seconds[kind] + (recompute if kind in BACKWARDS else 0.0)
                exposed = np.maximum(copies - work, 0.0)
                seconds[kind] = seconds[kind] + exposed
                comm[kind] = comm[kind] + exposed
                there = in_flight * self._largest_offloaded(kind, loads, offloaded)
                workspace[kind] = workspace[kind] + np.ceil(there)
        return Table(
            seconds=seconds,
            recompute_seconds=recompute,
            comm_seconds=comm,
            link_seconds=links,
            link_latency_seconds=self.profile.link_latency_seconds,
            held_bytes=held_bytes,
            workspace_bytes=workspace,
            resident_bytes=self.states_bytes,
        )

    def _largest_offloaded(
        self, op: Kind, loads: Loads, offloaded: Mapping[int, np.ndarray]
    ) -> np.ndarray:
        """[stages, chunks]: of one layer that is offloaded, of any kind that a chunk offloads.

        ``offloaded``   by kind, [stages, chunks] layers
        """
        most = []
        for kind, count in offloaded.items():
            layer = self.saved_bytes((kind, KEEP), loads)
            if op is Kind.INPUT:
                # Of what I leaves for W, counted from its start, theirs is still to be made.
                left = self._bytes(self.figures[kind].weight_input_bytes, loads)
                layer = np.maximum(layer - left, 0.0)
            most.append(np.where(count > 0, layer, 0.0))
        return np.max(most, axis=0)


@dataclass(frozen=True, slots=True, eq=False)
class _Layers:
    """Some layers of every stage and chunk, at their turn in backward.

    count, saved, again   [stages, chunks]: how many; bytes that each holds from F to B; bytes that
                          live again while it is recomputed
    kind                  [stages] the kind's number, -1 where there is none; None: only one kind
    """

    count: np.ndarray
    saved: np.ndarray
    again: np.ndarray
    kind: np.ndarray | None = None


def _comparable(figures: LayerFigures) -> tuple:
    return tuple(getattr(figures, field.name) for field in fields(LayerFigures))


def letter_counts(plan: Plan) -> dict[Choice, np.ndarray]:
    """counts[letter][stage, chunk]: layers of the stage with that recompute choice, 0 anywhere
    left out."""
    seen: dict[str, dict[str, int]] = {}
    counts: dict[Choice, np.ndarray] = {}
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
    ep: int | None = None,
    layer_kinds: Sequence[str] = (),
    profile: Profile | None = None,
    topology: str | Topology = FLAT,
    vocabulary_parallel: bool = False,
    **assumptions: Any,
) -> Cost:
    """The cost of a model on devices, both by name or file.

    Defaults: the device's own budget; even layers; zero 3 for the GPT models of the papers, else
    1; experts shared by as many of a stage's devices as their number allows; an analytic profile,
    to which ``assumptions`` go (:func:`analytic.profile`). ``layer_kinds``: of all layers, as a
    ``profile`` calls them, where the model does not say. ``topology``: by name or file, of an
    analytic profile; a measured one has its own groups' rates. ``vocabulary_parallel``: the output
    layer over all stages.
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
    network = None
    if profile is None:
        profile = analytic_profile(the_model, the_device, **assumptions)
        profile = _with_blocks(profile, the_model.vocabulary // tp, cp)
        joined = find_topology(topology) if isinstance(topology, str) else topology
        if joined is not None:
            network = Network.of(joined, the_device)
            if profile.link_seconds_per_token:
                boundary = profile.link_seconds_per_token * the_device.link_bytes_per_second
                rate = network.to_neighbour(tp * cp, dp, pp)
                profile = dataclasses.replace(profile, link_seconds_per_token=boundary / rate)
    budget = the_device.budget_bytes if memory_budget_gib is None else memory_budget_gib * GIB
    kinds = tuple(layer_kinds) or the_model.layer_kinds
    if not layer_kinds and len(profile.kinds) == 1:
        kinds = ()  # measured before there were kinds, or of one that has another name
    cost = Cost(
        budgeted(profile),
        stage_layers,
        (budget,) * pp,
        tp,
        cp,
        dp,
        zero,
        expert_degree(ep, tp, cp, the_model.most_experts, dp),
        kinds,
        network=network,
        vocabulary_parallel=vocabulary_parallel,
    )
    cost.require_states_fit()
    return cost


def _with_blocks(profile: Profile, words: int, cp: int) -> Profile:
    """Where the output layer runs early, it takes a block of each rank's rows at a time."""
    if profile.last_bytes.per_token or not profile.last_workspace_bytes[Kind.FORWARD].per_token:
        return profile
    return dataclasses.replace(profile, last_workspace_tokens=float(head_block_tokens(words) * cp))


def expert_degree(ep: int | None, tp: int, cp: int, experts: int | None, dp: int = 1) -> int:
    """Devices that share a layer's ``experts`` (None: some number): ``ep``, where it is possible;
    default: as many of the tp * cp as divide them. More than those are of several of the ``dp``
    replicas, all of each."""
    if ep is None:
        return tp * cp if experts is None else gcd(tp * cp, experts) if experts else 1
    if ep > 1 and experts == 0:
        raise ValueError(f"ep {ep}: the model has no experts; leave it out")
    if (tp * cp) % ep and (ep % (tp * cp) or dp % (ep // (tp * cp))):
        raise ValueError(
            f"ep {ep}: expected a divisor of tp x cp, {tp * cp}, or a multiple of it whose share "
            f"divides dp, {dp}"
        )
    if experts and experts % ep:
        raise ValueError(f"ep {ep}: expected a divisor of the {experts} experts")
    return ep
