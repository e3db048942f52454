"""Layout: a model's profile distributed over the stages and devices of one replica.

A layout defines the layers of each stage and their kinds, the number of devices over which a layer
is sharded, and the resulting coefficients. Seconds are linear in the columns of a chunk: tokens,
pairs and 1, which every layer has, and additional columns of some layer kinds
(:mod:`megatron_epp.cost.columns`).
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_epp.cost.columns import CHUNKS, PAIRS, TOKENS, Columns, WindowPairs
from megatron_epp.cost.kinds.base import element_bytes
from megatron_epp.cost.layer_kinds import StageKinds, format_kinds, stage_kinds
from megatron_epp.cost.loads import Loads
from megatron_epp.cost.network.topology import Network
from megatron_epp.cost.profile import (
    ANALYTIC,
    Bytes,
    LayerCoefficients,
    Profile,
    Seconds,
    Workspace,
    layer_coefficients,
)
from megatron_epp.ir import FULL, Kind
from megatron_epp.ir.placement import Placement


@dataclass(frozen=True)  # no slots, because its arrays are cached
class StageLayout:
    """Profile of a model and its distribution over stages and devices; bytes are per device."""

    profile: Profile  # coefficients of one layer of every kind, of embedding and LM head
    layers: tuple[int, ...]  # number of layers of each stage
    tp: int = 1  # tensor-parallel size
    cp: int = 1  # context-parallel size
    dp: int = 1  # data-parallel size
    # 1: weights stay on every device (Megatron's distributed optimizer). 3: model states are
    # sharded over the stage's devices, and layers are gathered for every chunk.
    zero: int = 1
    ep: int = 1  # expert-parallel size; above tp x cp it spans replicas, which run in lockstep
    layer_kinds: tuple[str, ...] = ()  # kind of each layer; empty: the profile's only kind
    network: Network | None = None  # places and rates of groups; None: rates of the profile
    vocabulary_parallel: bool = False  # whether the LM head is sharded over all stages (H, G)
    place: tuple[int, ...] = ()  # rank of each stage; empty if stage i is on rank i
    # Whether the experts of a rank are one product per linear (layers/moe/weight_stack.py), as in
    # training with --epp; the coefficients of a measured profile include it.
    stacked_experts: bool = False

    def __post_init__(self):
        if self.place and len(self.place) != len(self.layers):
            raise ValueError(
                f"{len(self.place)} stages have a rank and {len(self.layers)} have layers; "
                "expected the same number"
            )
        measured = self.profile.rank_slowness
        if measured and len(measured) != self.placement.ranks:
            raise ValueError(
                f"the cost model was measured on {len(measured)} pipeline ranks whose devices "
                f"differ, and the pipeline has {self.placement.ranks}; expected the same number"
            )
        if self.vocabulary_parallel and len(self.layers) == 1:
            raise ValueError(
                "vocabulary parallelism shards the LM head over the stages, and there is one; "
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
        """Return model, devices and parallel sizes in one line."""
        origin = self.profile.provenance
        return (
            f"{origin.model} on {self.devices * self.dp} x {origin.device}: "
            f"pp {self.placement.ranks}, cp {self.cp}, tp {self.tp}, dp {self.dp}, zero {self.zero}"
            + ", which --epp does not run"
            * (self.zero != 1)
        )

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.layers)

    @property
    def stages_per_rank(self) -> float:
        """Mean number of stages of a pipeline rank."""
        return self.stages / self.placement.ranks

    @cached_property
    def placement(self) -> Placement:
        """Rank of every stage."""
        return Placement(self.place or tuple(range(self.stages)))

    @property
    def lockstep(self) -> int:
        """Number of replicas that share a layer's experts, and so run in lockstep."""
        return max(1, self.ep // (self.tp * self.cp))

    @property
    def devices(self) -> int:
        """Number of devices of one replica."""
        return self.placement.ranks * self.tp * self.cp

    @cached_property
    def shards(self) -> float:
        """Divisor of the profile's coefficients: tp * cp divided by the profile's tp * cp."""
        return self.tp * self.cp / (self.profile.tp * self.profile.cp)

    @cached_property
    def slowness(self) -> np.ndarray:
        """[stages]: measured ratio of the seconds of each stage's rank to the profile's seconds."""
        measured = self.profile.rank_slowness or (1.0,) * self.placement.ranks
        return np.array(measured)[list(self.placement.place)]

    @cached_property
    def links_per_token(self) -> np.ndarray:
        """[stages]: seconds per token that a message occupies the link from a stage to the next.

        The last entry is the link from the last stage to the first.
        """
        return np.full(self.stages, self.profile.link_seconds_per_token)

    # --- layer kinds -----------------------------------------------------------------------------

    @cached_property
    def kinds(self) -> StageKinds:
        """Kinds of every stage's layers.

        Kinds with equal coefficients are merged, so that planners have fewer choices.
        """
        names = list(self.profile.kinds)
        every = [layer_coefficients(each) for each in self.profile.kinds.values()]
        alike = [every.index(each) for each in every]
        known = {name: alike[number] for number, name in enumerate(names)}
        of_layers = self.layer_kinds or (self.profile.layer_kind,) * sum(self.layers)
        return stage_kinds(names, [known[kind] for kind in of_layers], self.layers)

    @cached_property
    def coefficients(self) -> tuple[LayerCoefficients, ...]:
        """Coefficients of one layer of each kind in :attr:`kinds`."""
        known = self.profile.kinds
        every = [known[name] for name in self.kinds.names]
        if self.stacked_experts and self.profile.provenance.kind == ANALYTIC:
            return tuple(map(self._with_expert_gradients, every))
        return tuple(every)

    def _with_expert_gradients(self, of: LayerCoefficients) -> LayerCoefficients:
        """Return ``of`` with the gradients of a rank's experts in the workspaces of B and I.

        One matrix contains the gradients of one linear of all experts, in the weights' data type,
        until it is added to the full gradients. The first linear of gated experts has two thirds of
        their parameters.
        """
        element = element_bytes(self.profile.provenance.dtype)
        gradients = element * 2 / 3 * of.expert_parameters / self.ep
        if not gradients:
            return of
        workspaces = dict(of.workspace_bytes)
        for kind in (Kind.BACKWARD, Kind.INPUT):
            per_op = workspaces[kind].per_op + gradients * self.tp / self.profile.tp
            workspaces[kind] = dataclasses.replace(workspaces[kind], per_op=per_op)
        return dataclasses.replace(layer_coefficients(of), workspace_bytes=workspaces)

    @cached_property
    def predictions(self) -> int:
        """Number of tokens that the model predicts per position: runs of the LM head."""
        mtp_heads = [
            of * each.heads for of, each in zip(self.kinds.counts, self.coefficients, strict=True)
        ]
        return 1 + round(float(np.sum(mtp_heads)))

    @cached_property
    def pinned_layers(self) -> int:
        """Number of final layers that are on the last stage in every layout.

        It is 1 plus the number of layers inside MTP layers.
        """
        every = [self.coefficients[kind].heads > 0 for word in self.kinds.words for kind in word]
        return len(every) - every.index(True) + 1 if True in every else 1

    @property
    def kinds_text(self) -> str:
        """Kinds of all layers, as in ``3*dense 58*experts``; empty if all are equal."""
        return format_kinds(self.layer_kinds) if self.kinds.number > 1 else ""

    def over_stages(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Return the sum of ``rows`` [kinds, n] over the layers of each stage: [stages, n]."""
        total = np.outer(self.kinds.counts[0], rows[0])
        for count, row in zip(self.kinds.counts[1:], rows[1:], strict=True):
            total = total + np.outer(count, row)
        return total

    def sums(self, numbers: Iterable[float]) -> np.ndarray:
        """Return the sum of ``numbers``, one per kind, over the layers of each stage: [stages]."""
        return self.over_stages([np.array([number]) for number in numbers])[:, 0]

    def most_over_stages(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Return the maximum of ``rows`` [kinds, n] over the kinds of each stage: [stages, n]."""
        if len(rows) == 1:
            return np.tile(rows[0], (self.stages, 1))
        there = self.kinds.counts[:, :, None] > 0
        return np.where(there, np.stack(rows)[:, None, :], 0.0).max(axis=0)

    # --- coefficients of the profile in this layout ----------------------------------------------

    @cached_property
    def columns(self) -> Columns:
        """Columns of chunks in which the seconds of this layout's layers are linear."""
        known = {column for each in self.coefficients for column in each.column_seconds}
        known |= {WindowPairs(each.window) for each in self.coefficients if each.window}
        return Columns.of(known)

    def row(self, seconds: Seconds, of: LayerCoefficients | None = None) -> np.ndarray:
        """Return ``seconds`` as [columns]; if ``of`` has a window, pairs are those in it."""
        # The constant per chunk, mostly kernel launches, is not divided by the number of devices.
        row = np.zeros(self.columns.width)
        row[TOKENS], row[CHUNKS] = seconds.per_token / self.shards, seconds.per_chunk
        pairs = PAIRS if of is None or not of.window else self.columns.index(WindowPairs(of.window))
        row[pairs] = seconds.per_pair / self.shards
        return row

    def extra_columns_row(self, of: LayerCoefficients, kind: Kind) -> np.ndarray:
        """Return [columns]: seconds of one layer's op per unit of its additional columns."""
        row = np.zeros(self.columns.width)
        for column, seconds in of.column_seconds.items():
            row[self.columns.index(column)] = seconds.get(kind, 0.0) / self.shards
        return row

    def bytes_of(self, per: Bytes, loads: Loads) -> np.ndarray:
        """Return the bytes of chunks on one device: [chunks]; ``per`` has the bytes per token."""
        keeps = self.profile.stores_last_slice
        loose, kept = loads.loose_tokens(keeps), loads.cached_tokens(keeps)
        return (per.per_token * loose + per.per_cut_token * kept) / self.shards

    def fixed_bytes_of(self, per: Workspace, loads: Loads) -> np.ndarray | float:
        """Return the bytes of an op that do not depend on its chunk's tokens: [chunks] or a number.

        A number is returned if they do not depend on the chunk's context either. Most of these
        bytes are a weight's gradient, which only tensor parallelism shards.
        """
        fixed = per.per_op * self.profile.tp / self.tp
        if not per.per_context_token:
            return fixed
        return fixed + per.per_context_token * loads.earlier_tokens / self.shards

    def workspace_of(self, per: Workspace, loads: Loads) -> np.ndarray:
        """Return the bytes of a workspace on one device: [chunks]."""
        return self.bytes_of(per, loads) + self.fixed_bytes_of(per, loads)

    @cached_property
    def hidden_bytes(self) -> Bytes:
        """Bytes of the hidden state, the only tensor that a fully recomputed layer saves."""
        return min(
            (each.saved_bytes[FULL] for each in self.coefficients), key=lambda b: b.per_token
        )


def weighted_features(layout: StageLayout, per: np.ndarray, loads: Loads) -> np.ndarray:
    """Return ``per`` [..., columns] times the column values of ``loads``: [..., chunks].

    Each part of ``loads`` is multiplied separately, because the rounding of a matrix product
    depends on the sizes of the matrices.
    """
    each = [per @ layout.columns.features(part) for part in loads.parts]
    return each[0] if len(each) == 1 else np.concatenate(each, axis=-1)
