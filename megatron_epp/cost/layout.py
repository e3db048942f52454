"""Layout: a model's profile laid out on the stages and devices of one replica.

Which layers of which kind a stage has, over how many devices each is cut, and what the profile's
figures become there. What seconds are linear in, the features of a chunk, follows from the kinds:
tokens, pairs and 1, pairs of a window, tokens of context.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from megatron_epp.cost.layer_kinds import StageKinds, format_kinds, stage_kinds
from megatron_epp.cost.loads import Loads, pairs_before
from megatron_epp.cost.network.topology import Network, at_most
from megatron_epp.cost.profile import (
    Bytes,
    LayerFigures,
    Profile,
    Seconds,
    Workspace,
    layer_figures,
)
from megatron_epp.ir import FULL


@dataclass(frozen=True, slots=True)
class RankDevice:
    """Figures of one rank's devices: the seconds of ``profile``, and its ``network``."""

    profile: Profile
    network: Network | None = None


@dataclass(frozen=True)  # no slots: its arrays are computed once, when first asked for
class StageLayout:
    """The profile of a model, and how it is laid out; bytes are per device.

    profile        one layer's of every kind, and the ends'
    layers         of every stage, first to last
    device_budget_bytes   of every pipeline rank: all that training holds on one of its devices, for
                   all stages of the rank, states included
    tp, cp, dp     tensor- and context-parallel degrees of a stage, and replicas
    zero           1: weights stay on every device (Megatron's distributed optimizer);
                   3: states are sharded over the stage's devices, layers gathered for every chunk
    ep             devices that share the experts of a layer; more than tp x cp: those of several
                   replicas, which then run in lockstep
    layer_kinds    of all layers of the model, first to last, as the profile calls them; none: all
                   are of the profile's only kind
    host_budget_bytes   of the host's memory, for what one device offloads
    vocabulary_parallel  whether the output layer is cut over all stages (ops H and G)
    network        where groups lie and what they get there; none: the profile's rates by size
    place          the rank of every stage, where a rank has several; none: stage i on rank i
    rank_devices   of every rank, where they differ: seconds and rates are then theirs, bytes and
                   latency those of ``profile``. None: those of a profile that was measured on ranks
                   that differ (``rank_slowness``), else all as ``profile`` and ``network`` say
    """

    profile: Profile
    layers: tuple[int, ...]
    device_budget_bytes: tuple[float, ...]
    tp: int = 1
    cp: int = 1
    dp: int = 1
    zero: int = 1
    ep: int = 1
    layer_kinds: tuple[str, ...] = ()
    host_budget_bytes: float = math.inf
    network: Network | None = None
    vocabulary_parallel: bool = False
    place: tuple[int, ...] = ()
    rank_devices: tuple[RankDevice, ...] = ()

    def __post_init__(self):
        if self.place and len(self.place) != len(self.layers):
            raise ValueError(
                f"{len(self.place)} stages have a rank and {len(self.layers)} have layers; "
                "expected the same number"
            )
        if self.rank_devices and len(self.rank_devices) != self.ranks:
            raise ValueError(
                f"{len(self.rank_devices)} ranks have a device of their own, and the pipeline has "
                f"{self.ranks}; expected the same number"
            )
        if (measured := self.profile.rank_slowness) and len(measured) != self.ranks:
            raise ValueError(
                f"the cost model was measured on {len(measured)} pipeline ranks whose devices "
                f"differ, and the pipeline has {self.ranks}; expected the same number"
            )
        if self.vocabulary_parallel and len(self.layers) == 1:
            raise ValueError(
                "vocabulary parallelism cuts the output layer over the stages, and there is one; "
                "expected at least 2"
            )
        if not self.layers or min(self.layers) < 0:
            raise ValueError(f"layers {self.layers}: expected a number of layers for every stage")
        if len(self.device_budget_bytes) != self.ranks:
            raise ValueError(
                f"{len(self.device_budget_bytes)} memory budgets for {self.ranks} pipeline ranks; "
                "expected one for each"
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
    def rank_of(self) -> tuple[int, ...]:
        """The rank on which each stage lies."""
        return self.place or tuple(range(self.stages))

    @property
    def ranks(self) -> int:
        return 1 + max(self.rank_of)

    def of_ranks(self, values: Sequence[float]) -> tuple[float, ...]:
        """``values`` of every stage, added up for every rank."""
        return tuple(np.bincount(self.rank_of, weights=np.array(values)).tolist())

    @property
    def devices(self) -> int:
        """Number of one replica's devices."""
        return self.ranks * self.tp * self.cp

    @cached_property
    def shards(self) -> float:
        """Divisor of the profile's figures: this layout's devices over the profile's."""
        return self.tp * self.cp / (self.profile.tp * self.profile.cp)

    # --- devices that differ ---------------------------------------------------------------------

    @cached_property
    def unlike_devices(self) -> tuple[RankDevice, ...]:
        """The device of every rank, where they differ: ``rank_devices``, or as measured."""
        if self.rank_devices or not self.profile.rank_slowness:
            return self.rank_devices
        known = {
            factor: RankDevice(self.profile.slowed(factor), self.network)
            for factor in self.profile.rank_slowness
        }
        return tuple(known[factor] for factor in self.profile.rank_slowness)

    @property
    def slowness(self) -> tuple[float, ...]:
        """Seconds on every rank's device over the profile's, where it was measured."""
        return self.profile.rank_slowness or (1.0,) * self.ranks

    def on_devices(self, devices: Sequence[RankDevice] = (), **fields: Any) -> Self:
        """With these of every rank, none: all alike, and other ``fields``."""
        alike = replace(self.profile, rank_slowness=())
        return replace(self, **{"profile": alike, "rank_devices": tuple(devices), **fields})

    @cached_property
    def _on_devices(self) -> tuple[tuple[Self, ...], np.ndarray]:
        """This layout as if all ranks had the device of one, for each that there is; and [stages]
        the number of each stage's."""
        different = tuple(dict.fromkeys(map(id, self.unlike_devices)))
        known = {id(each): each for each in self.unlike_devices}
        layouts = tuple(
            self.on_devices(profile=known[at].profile, network=known[at].network)
            for at in different
        )
        own = [different.index(id(self.unlike_devices[rank])) for rank in self.rank_of]
        return layouts, np.array(own)

    def on_device_of(self, stage: int) -> Self:
        """This layout as if all ranks had the device of that stage."""
        if not self.unlike_devices:
            return self
        layouts, own = self._on_devices
        return layouts[own[stage]]

    def stagewise(self, of: Callable[[Self], np.ndarray]) -> np.ndarray:
        """``of`` this layout, [stages, ...]; where devices differ every row from the layout on that
        stage's device."""
        if not self.unlike_devices:
            return of(self)
        layouts, own = self._on_devices
        return np.stack([of(each) for each in layouts])[own, np.arange(self.stages)]

    @cached_property
    def links_per_token(self) -> np.ndarray:
        """[stages]: seconds per token that a message occupies the link from a stage to the next,
        from the last to the first; of two devices the slower one's."""
        own = self.stagewise(lambda each: np.full(each.stages, each.profile.link_seconds_per_token))
        return np.maximum(own, np.roll(own, -1))

    # --- kinds of layers -------------------------------------------------------------------------

    @cached_property
    def kinds(self) -> StageKinds:
        """The kinds of every stage's layers. Kinds with the same figures are one: nothing tells
        them apart, and planners have fewer to choose among."""
        names = list(self.profile.kinds)
        figures = [layer_figures(each) for each in self.profile.kinds.values()]
        alike = [figures.index(each) for each in figures]
        known = {name: alike[number] for number, name in enumerate(names)}
        every = self.layer_kinds or (self.profile.layer_kind,) * sum(self.layers)
        return stage_kinds(names, [known[kind] for kind in every], self.layers)

    @cached_property
    def figures(self) -> tuple[LayerFigures, ...]:
        """The figures of the kinds of :attr:`kinds`."""
        known = self.profile.kinds
        return tuple(known[name] for name in self.kinds.names)

    @cached_property
    def predictions(self) -> int:
        """Tokens that are predicted of every row: how often the output layer runs."""
        further = [
            of * each.heads for of, each in zip(self.kinds.counts, self.figures, strict=True)
        ]
        return 1 + round(float(np.sum(further)))

    @cached_property
    def pinned_layers(self) -> int:
        """Layers that lie on the last stage wherever others do: one, or where further tokens are
        predicted all that do so and one in front of them."""
        every = [self.figures[kind].heads > 0 for word in self.kinds.words for kind in word]
        return len(every) - every.index(True) + 1 if True in every else 1

    @property
    def kinds_text(self) -> str:
        """The kinds of all layers, first to last, as in ``3*dense 58*experts``; nothing where all
        are alike."""
        return format_kinds(self.layer_kinds) if self.kinds.number > 1 else ""

    def over_stages(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """[stages, n]: the sum over all layers of a stage; ``rows``: of one layer, by kind."""
        total = np.outer(self.kinds.counts[0], rows[0])
        for count, row in zip(self.kinds.counts[1:], rows[1:], strict=True):
            total = total + np.outer(count, row)
        return total

    def most_over_stages(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """[stages, n]: the most of any kind that a stage has; ``rows``: of one layer, by kind."""
        if len(rows) == 1:
            return np.tile(rows[0], (self.stages, 1))
        there = self.kinds.counts[:, :, None] > 0
        return np.where(there, np.stack(rows)[:, None, :], 0.0).max(axis=0)

    # --- features of a chunk ---------------------------------------------------------------------

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """Most keys of a query in the kinds of layers, the fewest first: those of windows, and
        those that queries choose."""
        known = (keys for each in self.figures for keys in (each.window, each.chosen))
        return tuple(sorted({*known} - {0}))

    @cached_property
    def _with_context(self) -> bool:
        return any(any(each.context_seconds.values()) for each in self.figures)

    @property
    def width(self) -> int:
        """Number of features."""
        return 3 + len(self.windows) + self._with_context

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

    # --- figures of the profile, laid out --------------------------------------------------------

    def row(
        self,
        seconds: Seconds,
        of: LayerFigures | None = None,
        context: float = 0.0,
        chosen: float = 0.0,
    ) -> np.ndarray:
        """[features] of ``seconds``, whose pairs are those of the kind ``of``'s window, of those
        per token of ``context``, and per pair that is ``chosen``."""
        # What a chunk costs whatever its size, launching kernels above all, is not divided.
        row = np.zeros(self.width)
        row[0], row[2] = seconds.per_token / self.shards, seconds.per_chunk
        column = 1 if of is None or not of.window else 3 + self.windows.index(of.window)
        row[column] = seconds.per_pair / self.shards
        if of is not None and of.chosen:
            row[3 + self.windows.index(of.chosen)] = chosen / self.shards
        if context:
            row[-1] = context / self.shards
        return row

    def bytes_of(self, per: Bytes, loads: Loads) -> np.ndarray:
        """[chunks] on one device."""
        keeps = self.profile.stores_last_slice
        loose, kept = loads.loose_tokens(keeps), loads.kept_tokens(keeps)
        return (per.per_token * loose + per.per_cut_token * kept) / self.shards

    def fixed_bytes_of(self, per: Workspace, loads: Loads) -> np.ndarray | float:
        """[chunks]: what an op needs whatever its chunk's tokens are. A weight's gradient, the most
        of what does not depend on the chunk, is sharded over tensor-parallel ranks alone."""
        fixed = per.per_op * self.profile.tp / self.tp
        if not per.per_context_token:
            return fixed
        return fixed + per.per_context_token * loads.behind_tokens / self.shards

    def workspace_of(self, per: Workspace, loads: Loads) -> np.ndarray:
        """[chunks]"""
        return self.bytes_of(per, loads) + self.fixed_bytes_of(per, loads)

    @cached_property
    def hidden_bytes(self) -> Bytes:
        """Size of the hidden state: what a layer that is recomputed in full holds is its input."""
        return min((each.saved_bytes[FULL] for each in self.figures), key=lambda b: b.per_token)

    # --- rates inside a stage --------------------------------------------------------------------

    def tensor_seconds(self, bytes_per_token: float) -> float:
        """Seconds per token of gathers and scatters inside a TP group that move so many bytes."""
        if self.tp == 1:
            return 0.0
        moved = bytes_per_token * (self.tp - 1) / self.tp
        if self.network is not None:
            return moved / (self.cp * self.network.ring(self.tp))
        return moved / (self.cp * at_most(self.profile.tensor_bytes_per_second, self.tp))

    def all_to_all_seconds(self, of: LayerFigures) -> float:
        """Seconds per token of one layer's forward to exchange rows for heads: eq. 3."""
        if self.cp == 1 or not of.all_to_all_bytes_per_token:
            return 0.0
        if self.network is not None:
            rate = self.network.all_to_all(self.cp, self.tp)
        else:
            rate = at_most(self.profile.all_to_all_bytes_per_second, self.cp)
        return of.all_to_all_bytes_per_token / (self.cp * self.tp * rate)

    def expert_seconds(self, of: LayerFigures) -> float:
        """Seconds per token of one layer's forward: to the experts' devices and back."""
        if self.ep == 1 or not of.expert_bytes_per_token:
            return 0.0
        if self.network is not None:
            rate = self.network.all_to_all(self.ep)
        else:
            rate = at_most(self.profile.all_to_all_bytes_per_second, self.ep)
        moved = of.expert_bytes_per_token * (self.ep - 1) / self.ep
        return moved / (self.cp * self.tp * rate)
