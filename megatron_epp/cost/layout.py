"""Layout: a model's profile laid out on the stages and devices of one replica.

Which layers of which kind a stage has, over how many devices each is sharded, and what the
profile's coefficients become there. Seconds are linear in the columns of a chunk: tokens, pairs and
1, which every layer has, and the further ones of its kinds (:mod:`megatron_epp.cost.columns`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from megatron_epp.cost.columns import CHUNKS, PAIRS, TOKENS, Column, WindowPairs
from megatron_epp.cost.layer_kinds import StageKinds, format_kinds, stage_kinds
from megatron_epp.cost.loads import Loads
from megatron_epp.cost.network.topology import Network
from megatron_epp.cost.profile import (
    Bytes,
    LayerCoefficients,
    Profile,
    Seconds,
    Workspace,
    layer_coefficients,
)
from megatron_epp.ir import FULL, Kind
from megatron_epp.ir.placement import Placement


@dataclass(frozen=True, slots=True)
class RankDevice:
    """The devices of one rank: the seconds of ``profile``, and its ``network``."""

    profile: Profile
    network: Network | None = None


@dataclass(frozen=True)  # no slots: its arrays are computed once, when first asked for
class StageLayout:
    """The profile of a model, and how it is laid out; bytes are per device.

    profile        one layer's of every kind, and the ends'
    layers         of every stage, first to last
    tp, cp, dp     tensor- and context-parallel degrees of a stage, and replicas
    zero           1: weights stay on every device (Megatron's distributed optimizer);
                   3: states are sharded over the stage's devices, layers gathered for every chunk
    ep             devices that share the experts of a layer; more than tp x cp: those of several
                   replicas, which then run in lockstep
    layer_kinds    of all layers of the model, first to last, as the profile calls them; none: all
                   are of the profile's only kind
    vocabulary_parallel  whether the output layer is cut over all stages (ops H and G)
    network        where groups lie and what they get there; none: the profile's rates by size
    place          the rank of every stage, where a rank has several; none: stage i on rank i
    rank_devices   of every rank, where they differ: seconds and rates are then theirs, bytes and
                   latency those of ``profile``. None: those of a profile that was measured on ranks
                   that differ (``rank_slowness``), else all as ``profile`` and ``network`` say
    """

    profile: Profile
    layers: tuple[int, ...]
    tp: int = 1
    cp: int = 1
    dp: int = 1
    zero: int = 1
    ep: int = 1
    layer_kinds: tuple[str, ...] = ()
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
        if self.rank_devices and len(self.rank_devices) != self.placement.ranks:
            raise ValueError(
                f"{len(self.rank_devices)} ranks have a device of their own, and the pipeline has "
                f"{self.placement.ranks}; expected the same number"
            )
        measured = self.profile.rank_slowness
        if measured and len(measured) != self.placement.ranks:
            raise ValueError(
                f"the cost model was measured on {len(measured)} pipeline ranks whose devices "
                f"differ, and the pipeline has {self.placement.ranks}; expected the same number"
            )
        if self.vocabulary_parallel and len(self.layers) == 1:
            raise ValueError(
                "vocabulary parallelism cuts the output layer over the stages, and there is one; "
                "expected at least 2"
            )
        if not self.layers or min(self.layers) < 0:
            raise ValueError(f"layers {self.layers}: expected a number of layers for every stage")
        for name in ("tp", "cp", "dp", "ep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: expected at least 1")
        if self.zero not in (1, 3):
            raise ValueError(f"zero {self.zero}: expected 1 or 3")
        self._require_kinds()

    def _require_kinds(self) -> None:
        known, layer_kinds = self.profile.kinds, self.layer_kinds
        if not layer_kinds:
            if len(known) > 1:
                raise ValueError(
                    f"the cost model has layers of the kinds {', '.join(known)}; expected the kind "
                    "of every layer"
                )
            return
        for kind in layer_kinds:
            if kind not in known:
                raise ValueError(
                    f"layers of kind {kind!r}: the cost model knows {', '.join(known)}"
                )
        if len(layer_kinds) != sum(self.layers):
            raise ValueError(
                f"kinds of layers {format_kinds(layer_kinds)!r}: of {len(layer_kinds)} layers, but "
                f"the stages have {sum(self.layers)}"
            )

    def __str__(self) -> str:
        """Model, devices and degrees, in one line."""
        origin = self.profile.provenance
        return (
            f"{origin.model} on {self.devices * self.dp} x {origin.device}: "
            f"pp {self.placement.ranks}, cp {self.cp}, tp {self.tp}, dp {self.dp}, zero {self.zero}"
        )

    @property
    def stages(self) -> int:
        return len(self.layers)

    @cached_property
    def placement(self) -> Placement:
        """The rank of every stage."""
        return Placement(self.place or tuple(range(self.stages)))

    @property
    def devices(self) -> int:
        """Number of one replica's devices."""
        return self.placement.ranks * self.tp * self.cp

    @cached_property
    def shards(self) -> float:
        """Divisor of the profile's coefficients: this layout's devices over the profile's."""
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
        return self.profile.rank_slowness or (1.0,) * self.placement.ranks

    def on_devices(self, devices: Sequence[RankDevice] = (), **fields: Any) -> Self:
        """With these of every rank, none: all alike, and other ``fields``."""
        alike = replace(self.profile, rank_slowness=(), replica_slowness=())
        return replace(self, **{"profile": alike, "rank_devices": tuple(devices), **fields})

    @cached_property
    def device_layouts(self) -> tuple[tuple[Self, ...], np.ndarray]:
        """This layout as if all ranks had the device of one, for each that there is; and [stages]
        the number of each stage's."""
        different = tuple(dict.fromkeys(map(id, self.unlike_devices)))
        known = {id(each): each for each in self.unlike_devices}
        layouts = tuple(
            self.on_devices(profile=known[at].profile, network=known[at].network)
            for at in different
        )
        own = [different.index(id(self.unlike_devices[rank])) for rank in self.placement.place]
        return layouts, np.array(own)

    def on_device_of(self, stage: int) -> Self:
        """This layout as if all ranks had the device of that stage."""
        if not self.unlike_devices:
            return self
        layouts, own = self.device_layouts
        return layouts[own[stage]]

    def stagewise(self, of: Callable[[Self], np.ndarray]) -> np.ndarray:
        """``of`` this layout, [stages, ...]; where devices differ every row from the layout on that
        stage's device."""
        if not self.unlike_devices:
            return of(self)
        layouts, own = self.device_layouts
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
        """The kinds of every stage's layers. Kinds with the same coefficients are one:
        nothing tells them apart, and planners have fewer to choose among."""
        names = list(self.profile.kinds)
        every = [layer_coefficients(each) for each in self.profile.kinds.values()]
        alike = [every.index(each) for each in every]
        known = {name: alike[number] for number, name in enumerate(names)}
        of_layers = self.layer_kinds or (self.profile.layer_kind,) * sum(self.layers)
        return stage_kinds(names, [known[kind] for kind in of_layers], self.layers)

    @cached_property
    def coefficients(self) -> tuple[LayerCoefficients, ...]:
        """Those of one layer of each kind in :attr:`kinds`."""
        known = self.profile.kinds
        return tuple(known[name] for name in self.kinds.names)

    @cached_property
    def predictions(self) -> int:
        """Tokens that are predicted of every row: how often the output layer runs."""
        mtp_heads = [
            of * each.heads for of, each in zip(self.kinds.counts, self.coefficients, strict=True)
        ]
        return 1 + round(float(np.sum(mtp_heads)))

    @cached_property
    def pinned_layers(self) -> int:
        """Layers that lie on the last stage wherever others do: one, or where further tokens are
        predicted all that do so and one in front of them."""
        every = [self.coefficients[kind].heads > 0 for word in self.kinds.words for kind in word]
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

    # --- columns ---------------------------------------------------------------------------------

    @cached_property
    def windows(self) -> tuple[WindowPairs, ...]:
        """The columns of windows, narrowest first."""
        known = {column for each in self.coefficients for column in each.column_seconds}
        known |= {WindowPairs(each.window) for each in self.coefficients if each.window}
        windows = (column for column in known if isinstance(column, WindowPairs))
        return tuple(sorted(windows, key=lambda column: column.size))

    @cached_property
    def extra_columns(self) -> tuple[Column, ...]:
        """Columns of the kinds of layers beside tokens, pairs and 1: pairs of windows, narrowest
        first, then the others by their names."""
        known = {column for each in self.coefficients for column in each.column_seconds}
        return (*self.windows, *sorted(known - {*self.windows}, key=str))

    def column(self, of: Column) -> int:
        """The number of a further column."""
        return 3 + self.extra_columns.index(of)

    @property
    def width(self) -> int:
        """Number of columns."""
        return 3 + len(self.extra_columns)

    def features(self, loads: Loads) -> np.ndarray:
        """[columns, chunks]: what seconds are linear in. Tokens, pairs, 1, and the further ones."""
        if self.extra_columns not in loads.features:
            rows = [loads.tokens, loads.pairs, np.ones(loads.chunks)]
            rows += [column.of_chunks(loads) for column in self.extra_columns]
            loads.features[self.extra_columns] = np.stack(rows)
            loads.features[self.extra_columns].flags.writeable = False
        return loads.features[self.extra_columns]

    def batch_features(self, lengths: np.ndarray, chunks: float) -> np.ndarray:
        """[columns] of whole documents of these lengths in ``chunks`` chunks."""
        lengths = np.asarray(lengths, dtype=np.float64)
        begins = np.zeros_like(lengths)
        sums = [lengths.sum(), (lengths * (lengths + 1) / 2).sum(), chunks]
        return np.array([*sums, *(c.of_spans(begins, lengths).sum() for c in self.extra_columns)])

    # --- coefficients of the profile, laid out ---------------------------------------------------

    def row(self, seconds: Seconds, of: LayerCoefficients | None = None) -> np.ndarray:
        """[columns] of ``seconds``, whose pairs are those of the window of ``of``."""
        # What a chunk costs whatever its size, launching kernels above all, is not divided.
        row = np.zeros(self.width)
        row[TOKENS], row[CHUNKS] = seconds.per_token / self.shards, seconds.per_chunk
        pairs = PAIRS if of is None or not of.window else self.column(WindowPairs(of.window))
        row[pairs] = seconds.per_pair / self.shards
        return row

    def extra_columns_row(self, of: LayerCoefficients, kind: Kind) -> np.ndarray:
        """[columns] of one layer's op: its kind's further columns alone."""
        row = np.zeros(self.width)
        for column, seconds in of.column_seconds.items():
            row[self.column(column)] = seconds.get(kind, 0.0) / self.shards
        return row

    def bytes_of(self, per: Bytes, loads: Loads) -> np.ndarray:
        """[chunks] on one device."""
        keeps = self.profile.stores_last_slice
        loose, kept = loads.loose_tokens(keeps), loads.cached_tokens(keeps)
        return (per.per_token * loose + per.per_cut_token * kept) / self.shards

    def fixed_bytes_of(self, per: Workspace, loads: Loads) -> np.ndarray | float:
        """[chunks]: what an op needs whatever its chunk's tokens are. A weight's gradient, the most
        of what does not depend on the chunk, is sharded over tensor-parallel ranks alone."""
        fixed = per.per_op * self.profile.tp / self.tp
        if not per.per_context_token:
            return fixed
        return fixed + per.per_context_token * loads.earlier_tokens / self.shards

    def workspace_of(self, per: Workspace, loads: Loads) -> np.ndarray:
        """[chunks]"""
        return self.bytes_of(per, loads) + self.fixed_bytes_of(per, loads)

    @cached_property
    def hidden_bytes(self) -> Bytes:
        """Size of the hidden state: what a layer that is recomputed in full holds is its input."""
        return min(
            (each.saved_bytes[FULL] for each in self.coefficients), key=lambda b: b.per_token
        )


def weighted_features(layout: StageLayout, per: np.ndarray, loads: Loads) -> np.ndarray:
    """[..., chunks]: ``per`` [..., columns] times the features of ``loads``, each part of them for
    itself, since the last bit of a product depends on its size."""
    each = [per @ layout.features(part) for part in loads.parts]
    return each[0] if len(each) == 1 else np.concatenate(each, axis=-1)
