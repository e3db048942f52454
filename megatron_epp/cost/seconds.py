"""Seconds of every op on every stage.

    seconds[s, c] = seconds_per(kind)[s] . (tokens[c], pairs[c], 1)

Of a chunk of which context-parallel ranks compute some documents alone, tokens and pairs are those
that the slowest rank makes of it (:class:`~megatron_epp.cost.loads.Loads`), and only what is spread
over the ranks is exchanged. Where the model has layers of several kinds, a stage is the sum over
its layers, and there may be further features (:meth:`StageLayout.features`).

Eq. 11's share of a recomputed layer is one layer's forward; a gather per chunk costs time under
ZeRO 3 only.
"""

from collections.abc import Callable, Mapping
from functools import cached_property

import numpy as np

from megatron_epp.cost.layer_kinds import Choice
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.loads import Loads
from megatron_epp.cost.output_layer import OutputLayer, output_layer_of
from megatron_epp.cost.profile import LayerFigures
from megatron_epp.ir import BACKWARDS, FULL, OF_HEAD, OF_LAYERS, OFFLOAD, SELECTIVE, Kind

_EXCHANGING = (Kind.FORWARD, *BACKWARDS)


class OpSeconds(StageLayout):
    """A layout with the seconds of its ops."""

    @cached_property
    def output_layer(self) -> OutputLayer:
        return output_layer_of(self)

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
        if self.unlike_devices:
            return self._of_devices(lambda each, kind: each._seconds[kind])
        result = {}
        for kind in OF_LAYERS:
            per = self.over_stages(
                [
                    self.row(
                        each.layer_seconds[kind],
                        each,
                        each.context_seconds.get(kind, 0.0),
                        each.chosen_seconds.get(kind, 0.0),
                    )
                    for each in self.figures
                ]
            )
            per[0] += self.row(self.profile.first_seconds[kind])
            result[kind] = per + self.output_layer.seconds(kind)
        return {**result, **self.output_layer.head_seconds()}

    @cached_property
    def _comm(self) -> Mapping[Kind, np.ndarray]:
        if self.unlike_devices:
            return self._of_devices(lambda each, kind: each._comm[kind])
        result = {}
        for kind in OF_LAYERS:
            rows = []
            for each in self.figures:
                layer = np.zeros(self.width)
                if kind is not Kind.WEIGHT:
                    layer[0] = self._exposed(each)
                if self.zero == 3:
                    layer[2] = each.gather_seconds[kind]
                rows.append(layer)
            result[kind] = self.over_stages(rows)
        return {**result, **self.output_layer.head_comm_seconds()}

    def _of_devices(
        self, of: Callable[["OpSeconds", Kind], np.ndarray]
    ) -> Mapping[Kind, np.ndarray]:
        """[stages, ...] by kind, where devices differ."""
        return {
            kind: self.stagewise(lambda each, kind=kind: of(each, kind))  # type: ignore[misc]
            for kind in (*OF_LAYERS, *OF_HEAD)
        }

    def _exposed(self, of: LayerFigures) -> float:
        """Seconds per token of one layer's forward that go to communication."""
        tensor = self.tensor_seconds(of.tensor_bytes_per_token)
        return self.all_to_all_seconds(of) + tensor + self.expert_seconds(of)

    def _exchange(self, of: LayerFigures, kind: Kind) -> float:
        """Seconds per token of one layer's op that go to exchanging rows for heads, whether they
        were measured with the layer or not."""
        if self.cp == 1 or kind not in _EXCHANGING:
            return 0.0
        measured = min(of.exchange_seconds.get(kind, 0.0), of.layer_seconds[kind].per_token)
        return self.all_to_all_seconds(of) + measured / self.shards

    @cached_property
    def exchange_per_token(self) -> Mapping[Kind, np.ndarray]:
        """[stages] by kind: seconds that go to exchanging rows for heads; rows of documents that
        one context-parallel rank computes alone do without."""
        if self.unlike_devices:
            return self._of_devices(lambda each, kind: each.exchange_per_token[kind])
        return {
            kind: self.over_stages(
                [np.array([self._exchange(each, kind)]) for each in self.figures]
            )[:, 0]
            for kind in self._seconds
        }

    def _unexchanged(self, per_token: np.ndarray, loads: Loads) -> np.ndarray | float:
        """[stages, chunks]: seconds that local documents do without; 0 where there are none."""
        if loads.local is None:
            return 0.0
        return np.outer(per_token, loads.local.tokens)

    def seconds(self, kind: Kind, loads: Loads) -> np.ndarray:
        """[stages, chunks]: alone, without recompute."""
        taken = self.seconds_per(kind) @ self.features(loads)
        if kind in OF_HEAD:  # which exchanges no rows for heads
            return taken
        return taken - self._unexchanged(self.exchange_per_token[kind], loads)

    def comm_seconds(self, kind: Kind, loads: Loads) -> np.ndarray:
        """[stages, chunks]: exposed communication inside :meth:`seconds`."""
        exposed = self.comm_seconds_per(kind) @ self.features(loads)
        if loads.local is None or kind not in _EXCHANGING:
            return exposed
        return exposed - self._unexchanged(self.stagewise(OpSeconds._all_to_all), loads)

    def _all_to_all(self) -> np.ndarray:
        """[stages]: seconds per token of all layers' forwards to exchange rows for heads."""
        rows = [np.array([self.all_to_all_seconds(each)]) for each in self.figures]
        return self.over_stages(rows)[:, 0]

    def recompute_seconds_per(self, choice: Choice) -> np.ndarray:
        """[features]: seconds that one layer with that choice adds to B or I."""
        kind, letter = choice
        of = self.figures[kind]
        if letter == OFFLOAD:
            return np.zeros(self.width)
        modules = SELECTIVE.get(letter, ())
        attends = letter == FULL or "core_attn" in modules
        again = (of.context_seconds, of.chosen_seconds) if attends else ({}, {})
        forward = (each.get(Kind.FORWARD, 0.0) for each in again)
        row = self.row(of.recompute_seconds[letter], of, *forward)
        if letter == FULL:
            row[0] += self._exposed(of)
        elif _exchanges(letter):
            row[0] += self.all_to_all_seconds(of)
        elif "mlp" in modules:
            tensor = self.tensor_seconds(of.tensor_bytes_per_token)
            row[0] += tensor / 2 + self.expert_seconds(of)
        return row

    def recompute_seconds(self, choice: Choice, loads: Loads) -> np.ndarray:
        """[chunks]: of one layer; where devices differ [stages, chunks]."""
        if self.unlike_devices:
            return self.stagewise(
                lambda each: np.tile(each.recompute_seconds(choice, loads), (self.stages, 1))
            )
        taken = self.recompute_seconds_per(choice) @ self.features(loads)
        if loads.local is None:
            return taken
        kind, letter = choice
        if _exchanges(letter):
            exchange = self._exchange(self.figures[kind], Kind.FORWARD)
            taken = taken - exchange * loads.local.tokens
        return taken

    def link_seconds(self, loads: Loads) -> np.ndarray:
        """[stages - 1, chunks]: that a message of the chunk occupies each link between stages."""
        return np.outer(self.links_per_token[:-1], loads.tokens)


def _exchanges(letter: str) -> bool:
    """Whether what runs again with that choice exchanges rows for heads."""
    modules = SELECTIVE.get(letter, ())
    return letter == FULL or "core_attn" in modules or "mla_up_proj" in modules
