"""Seconds of every op on every stage.

    seconds[s, c] = per(kind)[s] . (tokens[c], pairs[c], 1, additional columns)

An op takes at least the time in which the host issues it. For a chunk with single-rank documents,
tokens and pairs are scaled to the busiest rank (:func:`~megatron_epp.cost.loads.over_ranks`). Only
tokens of sharded documents are exchanged between ranks. The coefficients of a stage are sums over
its layers, which may be of several kinds with additional columns
(:mod:`megatron_epp.cost.columns`).

Full recompute of a layer costs the layer's forward (eq. 11 of InfiniPipe). Gathering the parameters
for every chunk costs time with ZeRO 3 only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_epp.cost.columns import CHUNKS, TOKENS
from megatron_epp.cost.communication import (
    all_to_all_seconds,
    expert_seconds,
    exposed_seconds,
    gather_latency,
    gathered_bytes,
    tensor_seconds,
    uncovered_seconds,
)
from megatron_epp.cost.ends import Ends
from megatron_epp.cost.halves import HOST_OF_HALVES, gains, hidden_seconds, repeated_seconds
from megatron_epp.cost.layer_kinds import Choice, Counts
from megatron_epp.cost.layout import StageLayout, weighted_features
from megatron_epp.cost.loads import Loads
from megatron_epp.cost.profile import LayerCoefficients
from megatron_epp.ir import BACKWARDS, FULL, KEEP, OF_HEAD, OF_LAYERS, OFFLOAD, SELECTIVE, Kind
from megatron_epp.ir.recompute import MLP_RECOMPUTED

# Host time to issue the experts of a rank as one product per linear, as a fraction of that of the
# rest of the layer, by counts of Python calls (tests/gpu/test_host_calls.py).
HOST_OF_STACK = 0.3

_EXCHANGING = (Kind.FORWARD, *BACKWARDS)
# Host time of the recompute in a backward, relative to the host time of a layer's forward: for a
# full layer and for modules. On the host of an H100 a backward takes 4.1 ms with full recompute and
# 1.65 ms without; a forward takes 2.1 ms.
HOST_AGAIN, HOST_AGAIN_PART = 1.15, 0.4


@dataclass(frozen=True, eq=False)  # no slots, because its arrays are cached
class OpSeconds:
    """Seconds of the ops of ``layout``; ``ends`` are the embedding and the LM head.

    Computation takes ``layout.slowness`` times as long on a stage whose rank was measured slower.
    """

    layout: StageLayout
    ends: Ends

    def of(self, kind: Kind, loads: Loads) -> np.ndarray:
        """Return [stages, chunks]: seconds without recompute, at least the host's issue time."""
        return np.maximum(self.device(kind, loads), self.host_of(kind, loads))

    def device(self, kind: Kind, loads: Loads) -> np.ndarray:
        """Return the seconds of the device alone, without recompute: [stages, chunks]."""
        taken = weighted_features(self.layout, self.per(kind), loads)
        if kind in OF_HEAD:  # H and G exchange no rows for heads
            return taken
        taken = taken - _unexchanged(self.exchange_per_token[kind], loads)
        if (halved := self._halved(loads)) is not None:
            repeated = self._repeated[kind][:, None]
            taken -= halved * (np.outer(self.hidden_per_token[kind], loads.tokens) - repeated)
        return taken

    def per(self, kind: Kind) -> np.ndarray:
        """Return [stages, columns]: seconds per token, pair, chunk and unit of other columns.

        The seconds include exposed communication; those of B and I exclude recompute.
        """
        return self._computation[kind] + self._communication[kind]

    def communication(self, kind: Kind, loads: Loads) -> np.ndarray:
        """Return [stages, chunks]: seconds of exposed communication, which :meth:`of` includes."""
        exposed = weighted_features(self.layout, self.communication_per(kind), loads)
        if kind in self.hidden_per_token and (halved := self._halved(loads)) is not None:
            exposed = exposed - halved * np.outer(self.hidden_per_token[kind], loads.tokens)
        if loads.local is None or kind not in _EXCHANGING:
            return exposed
        return exposed - _unexchanged(_all_to_all(self.layout), loads)

    def communication_per(self, kind: Kind) -> np.ndarray:
        """Return [stages, columns]: seconds of communication, which :meth:`per` includes."""
        return self._communication[kind]

    @cached_property
    def _computation(self) -> Mapping[Kind, np.ndarray]:
        layout, result = self.layout, {}
        for kind in OF_LAYERS:
            rows = [_computed_row(layout, each, kind) for each in layout.coefficients]
            if kind is Kind.WEIGHT:
                for row, each in zip(rows, layout.coefficients, strict=True):
                    row[TOKENS] += _read_seconds(layout, gathered_bytes(layout, each))
            result[kind] = layout.over_stages(rows)
            self.ends.add_seconds(kind, result[kind])
        every = {**result, **self.ends.head_seconds()}
        return {kind: seconds * layout.slowness[:, None] for kind, seconds in every.items()}

    @cached_property
    def _communication(self) -> Mapping[Kind, np.ndarray]:
        result = {}
        for kind in OF_LAYERS:
            rows = [_exposed_row(self.layout, each, kind) for each in self.layout.coefficients]
            result[kind] = self.layout.over_stages(rows)
        return {**result, **self.ends.head_comm_seconds()}

    # --- experts in two halves of rows -----------------------------------------------------------

    @cached_property
    def halved_from(self) -> float:
        """Number of tokens from which F and B of every layer of experts are faster in halves."""
        layout, ops = self.layout, (Kind.FORWARD, Kind.BACKWARD)
        least = []
        for each in layout.coefficients:
            rows = [_computed_row(layout, each, op) + _exposed_row(layout, each, op) for op in ops]
            totals = (
                sum(of(layout, each, op) for op in ops)
                for of in (hidden_seconds, repeated_seconds, _host)
            )
            if each.expert_bytes_per_token:
                least.append(gains(*totals, *np.sum(rows, axis=0)[[TOKENS, CHUNKS]]))
        return float(np.ceil(max(least, default=np.inf)))

    def _halved(self, loads: Loads) -> np.ndarray | None:
        """Return [chunks], whether each chunk is halved; None if no chunk of any size is."""
        return None if self.halved_from == np.inf else loads.tokens >= self.halved_from

    @cached_property
    def hidden_per_token(self) -> Mapping[Kind, np.ndarray]:
        """Seconds per token that halves hide: [stages] by kind of op."""
        return self._per_stage(hidden_seconds)

    @cached_property
    def _repeated(self) -> Mapping[Kind, np.ndarray]:
        return self._per_stage(repeated_seconds)

    @cached_property
    def _host_again(self) -> Mapping[Kind, np.ndarray]:
        """Seconds of the host that halves add: [stages] by kind of op."""

        def again(layout: StageLayout, of: LayerCoefficients, kind: Kind) -> float:
            return (HOST_OF_HALVES - 1) * bool(of.expert_parameters) * _host(layout, of, kind)

        return self._per_stage(again)

    def _per_stage(
        self, seconds: Callable[[StageLayout, LayerCoefficients, Kind], float]
    ) -> dict[Kind, np.ndarray]:
        layout = self.layout
        return {
            kind: layout.sums(seconds(layout, each, kind) for each in layout.coefficients)
            for kind in OF_LAYERS
        }

    # --- the host --------------------------------------------------------------------------------

    def host_of(self, kind: Kind, loads: Loads) -> np.ndarray:
        """Return the seconds of the host to issue an op, without recompute: [stages, chunks].

        The second dimension is 1 for H and G, and if experts process chunks of all sizes as a whole
        instead of in two halves (cost/halves.py).
        """
        host = self.host[kind][:, None]
        if kind in OF_HEAD or (halved := self._halved(loads)) is None:
            return host
        return host + np.outer(self._host_again[kind], halved)

    @cached_property
    def host(self) -> Mapping[Kind, np.ndarray]:
        """Seconds of the host to issue an op, without recompute: [stages] by kind."""
        return dict.fromkeys(Kind, np.zeros(self.layout.stages)) | self._per_stage(_host)

    def exposed_recompute(
        self, counts: Counts, recompute: np.ndarray, device: np.ndarray, host: np.ndarray
    ) -> np.ndarray:
        """Return [stages, chunks]: the seconds that ``recompute`` adds to a B.

        The seconds of B are the maximum of the host's and the device's, also with recompute.

        Args:
            counts: [stages, chunks], number of layers by (kind, recompute mode).
            recompute: [stages, chunks], seconds of the recompute on the device.
            device: [stages, chunks], seconds of B on the device (:meth:`device`).
            host: [stages, chunks or 1], seconds of the host to issue B (:meth:`host_of`).
        """
        if not host.any():
            return recompute
        again = np.zeros_like(recompute)
        for (kind, mode), count in counts.items():
            fraction = HOST_AGAIN if mode == FULL else HOST_AGAIN_PART
            if mode not in (KEEP, OFFLOAD):
                forward = _host(self.layout, self.layout.coefficients[kind], Kind.FORWARD)
                again += fraction * forward * count
        both = np.maximum(device + recompute, host + again)
        return np.maximum(both - np.maximum(device, host), 0.0)

    # --- single-rank documents -------------------------------------------------------------------

    def _exchange(self, of: LayerCoefficients, kind: Kind) -> np.ndarray:
        """Return the seconds per token of the all-to-alls over CP ranks in one layer's op: [2].

        These are the predicted seconds, and the measured seconds, a part of ``layer_seconds``.
        """
        if self.layout.cp == 1 or kind not in _EXCHANGING:
            return np.zeros(2)
        measured = min(of.exchange_seconds.get(kind, 0.0), of.layer_seconds[kind].per_token)
        return np.array([all_to_all_seconds(self.layout, of), measured / self.layout.shards])

    @cached_property
    def exchange_per_token(self) -> Mapping[Kind, np.ndarray]:
        """Seconds per token of the all-to-alls over CP ranks: [stages] by kind of op.

        Single-rank documents do not need these all-to-alls.
        """
        layout, result = self.layout, {}
        for kind in self._computation:
            per = layout.over_stages([self._exchange(each, kind) for each in layout.coefficients])
            result[kind] = per[:, 0] + layout.slowness * per[:, 1]
        return result

    # --- recompute, links ------------------------------------------------------------------------

    @cached_property
    def _recompute_rows(self) -> dict[Choice, np.ndarray]:
        return {}

    def recompute_per(self, choice: Choice) -> np.ndarray:
        """Return [columns]: seconds that one layer with ``choice`` (kind, mode) adds to B or I."""
        if choice not in self._recompute_rows:
            self._recompute_rows[choice] = self._recompute_row(choice)
        return self._recompute_rows[choice]

    def _recompute_row(self, choice: Choice) -> np.ndarray:
        """Compute :meth:`recompute_per`: the recomputed modules and their communication."""
        kind, mode = choice
        layout, of = self.layout, self.layout.coefficients[kind]
        if mode == OFFLOAD:
            return np.zeros(layout.columns.width)
        modules = SELECTIVE.get(mode, ())
        row = layout.row(of.recompute_seconds[mode], of)
        if mode == FULL or "core_attn" in modules:
            row += layout.extra_columns_row(of, Kind.FORWARD)
        if mode == FULL:
            row += _weights_row(layout, of, Kind.FORWARD)
            row[TOKENS] += exposed_seconds(layout, of)
            row[CHUNKS] += gather_latency(layout, of)
        elif _exchanges(mode):
            row[TOKENS] += all_to_all_seconds(layout, of)
        elif "mlp" in modules:
            tensor = tensor_seconds(layout, of.tensor_bytes_per_token)
            row[TOKENS] += tensor / 2 + expert_seconds(layout, of)
        return row

    def recompute(self, choice: Choice, loads: Loads) -> np.ndarray:
        """Return [chunks]: seconds to recompute a layer; [stages, chunks] if ranks differ."""
        taken = weighted_features(self.layout, self.recompute_per(choice), loads)
        kind, mode = choice
        if loads.local is not None and _exchanges(mode):
            exchange = self._exchange(self.layout.coefficients[kind], Kind.FORWARD).sum()
            taken = taken - exchange * loads.local.tokens
        if mode in MLP_RECOMPUTED:
            taken = taken - self._gain(kind, loads)
        if not self.layout.profile.rank_slowness:
            return taken
        return np.outer(self.layout.slowness, taken)  # the layer's communication included

    def _gain(self, kind: int, loads: Loads) -> np.ndarray | float:
        """Return [chunks]: seconds by which halves shorten the forward of a layer of ``kind``."""
        if (halved := self._halved(loads)) is None:
            return 0.0
        layout, of = self.layout, self.layout.coefficients[kind]
        hidden = hidden_seconds(layout, of, Kind.FORWARD) * loads.tokens
        return halved * (hidden - repeated_seconds(layout, of, Kind.FORWARD))

    def link(self, loads: Loads) -> np.ndarray:
        """Return [stages - 1, chunks]: seconds that a message occupies each link between stages."""
        return np.outer(self.layout.links_per_token[:-1], loads.tokens)


def _computed_row(layout: StageLayout, of: LayerCoefficients, kind: Kind) -> np.ndarray:
    """Return [columns]: seconds of one layer's op, without communication."""
    row = layout.row(of.layer_seconds[kind], of)
    return row + layout.extra_columns_row(of, kind) + _weights_row(layout, of, kind)


def _exposed_row(layout: StageLayout, of: LayerCoefficients, kind: Kind) -> np.ndarray:
    """Return [columns]: seconds of communication of one layer's op."""
    row = np.zeros(layout.columns.width)
    if kind is not Kind.WEIGHT:
        row[TOKENS] = exposed_seconds(layout, of)
        row[CHUNKS] = gather_latency(layout, of)
    if kind is Kind.INPUT:
        row[[TOKENS, CHUNKS]] += uncovered_seconds(layout, of)
    if layout.zero == 3:
        row[CHUNKS] += of.gather_seconds[kind]
    return row


def _unexchanged(per_token: np.ndarray, loads: Loads) -> np.ndarray | float:
    """Return [stages, chunks]: seconds that single-rank documents save by exchanging no rows."""
    if loads.local is None:
        return 0.0
    return np.outer(per_token, loads.local.tokens)


def _all_to_all(layout: StageLayout) -> np.ndarray:
    """Return [stages]: seconds per token to exchange rows for heads in the stage's forward."""
    return layout.sums(all_to_all_seconds(layout, each) for each in layout.coefficients)


def _host(layout: StageLayout, of: LayerCoefficients, kind: Kind) -> float:
    """Return the seconds of the host to issue one layer's op, with those of this rank's experts."""
    own = of.host_seconds.get(kind, 0.0)
    experts = of.expert_host_seconds.get(kind, 0.0) / layout.ep
    if layout.stacked_experts:
        experts = min(experts, HOST_OF_STACK * own)
    return own + experts


def _weights_row(layout: StageLayout, of: LayerCoefficients, kind: Kind) -> np.ndarray:
    """Return [columns]: a layer op's seconds per chunk to read weights and write gradients."""
    row = np.zeros(layout.columns.width)
    row[CHUNKS] = of.weight_seconds.get(kind, 0.0) * layout.profile.tp / layout.tp
    row[CHUNKS] += of.expert_weight_seconds.get(kind, 0.0) / layout.ep
    return row


def _read_seconds(layout: StageLayout, bytes_: float) -> float:
    """Return the seconds to read ``bytes_`` from the device's memory; 0 if its rate is unknown."""
    rate = 0.0 if layout.network is None else layout.network.copy_bytes_per_second
    return bytes_ / rate if rate else 0.0


def _exchanges(mode: str) -> bool:
    """Return whether the modules recomputed in ``mode`` repeat all-to-alls over CP ranks."""
    modules = SELECTIVE.get(mode, ())
    return mode == FULL or "core_attn" in modules or "mla_up_proj" in modules
