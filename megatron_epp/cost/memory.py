"""Bytes of model states, and of every chunk on every stage.

K, V and their gradients are counted only for documents that are cut or that other documents
continue. They are counted once for all chunks that read them; the rule table (ir.rules) defines
when they exist. A backward frees activations layer by layer while it makes gradients and recomputes
(:mod:`megatron_epp.cost.backward_peak`).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_epp.cost.communication import gathered_bytes
from megatron_epp.cost.ends import Ends
from megatron_epp.cost.layer_kinds import Choice, Counts
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.loads import Loads
from megatron_epp.cost.profile import LayerCoefficients
from megatron_epp.ir import FULL, KEEP, OFFLOAD, SELECTIVE, Kind

# Modes in which the MLP saves nothing from F to B and is recomputed during B.
_WITHOUT_MLP = frozenset({FULL, *(a for a, modules in SELECTIVE.items() if "mlp" in modules)})


@dataclass(frozen=True, eq=False)  # no slots, because its arrays are cached
class ChunkMemory:
    """Bytes of model states and chunks of a ``layout`` with these ``ends``, on one device."""

    layout: StageLayout
    ends: Ends

    # --- model states ----------------------------------------------------------------------------

    @cached_property
    def states_bytes(self) -> tuple[float, ...]:
        """Weights, gradients, optimizer states and gather buffers of every stage, on one device."""
        layout, (parameters, experts) = self.layout, self.parameters
        states = layout.profile.states
        # Optimizer states are sharded over all devices that hold the same weights.
        sharded = parameters / (layout.cp * layout.dp)
        sharded = sharded + experts * (layout.ep / (layout.tp * layout.cp * layout.dp))
        if layout.zero == 1:
            held = states.zero1_resident * (parameters + experts) + states.zero1_sharded * sharded
        else:
            fraction = layout.tp / layout.ep
            largest = layout.most_over_stages(
                [
                    np.array([each.layer_parameters + each.expert_parameters * fraction])
                    for each in layout.coefficients
                ]
            )[:, 0]
            gathered = np.minimum(layout.layers, states.zero3_layers) * largest / layout.tp
            held = states.zero3_sharded * sharded + states.zero3_gathered * gathered
        return tuple(map(float, np.ceil(held)))

    @cached_property
    def parameters(self) -> tuple[np.ndarray, np.ndarray]:
        """Two float arrays [stages] with the number of parameters on one device with ZeRO 1.

        The first array counts parameters outside of experts, which are sharded over the
        tensor-parallel ranks. The second counts the experts' parameters, which are sharded over the
        expert-parallel ranks.
        """
        layout = self.layout
        of_layers = layout.sums(each.layer_parameters for each in layout.coefficients)
        of_experts = layout.sums(each.expert_parameters for each in layout.coefficients)
        return (of_layers + self.ends.parameters()) / layout.tp, of_experts / layout.ep

    # --- from F to B, and from I to W ------------------------------------------------------------

    def saved_bytes(self, choice: Choice, loads: Loads) -> np.ndarray:
        """Return the bytes that one layer holds from F to B, without cached K and V: [chunks]."""
        kind, mode = choice
        of = self.layout.coefficients[kind]
        if mode == OFFLOAD:
            return np.zeros(loads.chunks)
        held = self.layout.bytes_of(of.saved_bytes[mode], loads)
        if mode not in _WITHOUT_MLP and self._is_routed(of):
            held = held + self._routed(of, loads)
        return held

    def _routed(self, of: LayerCoefficients, loads: Loads) -> np.ndarray:
        """Return the bytes of a layer's experts on the fullest device minus the mean: [chunks].

        All bytes that a layer with a recomputed MLP does not save count as bytes of the experts.
        """
        kept, without_mlp = of.saved_bytes[KEEP], of.saved_bytes["m"]
        inside = self.layout.bytes_of(kept, loads) - self.layout.bytes_of(without_mlp, loads)
        return (self.layout.profile.routing - 1) * np.maximum(inside, 0.0)

    def _is_routed(self, of: LayerCoefficients) -> bool:
        """Return whether some device gets more than the mean number of tokens for the experts."""
        return self.layout.profile.routing > 1 and self.layout.ep > 1 and of.expert_parameters > 0

    def activation_bytes(self, loads: Loads, counts: Counts) -> np.ndarray:
        """Return the bytes held from F to B with ``counts`` of layers by (kind, recompute mode).

        The shape is [stages, chunks].
        """
        held = self.ends.held_bytes(loads)
        for choice, count in counts.items():
            held += count * self.saved_bytes(choice, loads)
        return np.ceil(held)

    def kv_shards(self, of: LayerCoefficients) -> float:
        """Return the number of shards of a layer's K and V, or latents; 1 if replicated."""
        return 1.0 if of.kv_replicated else self.layout.shards

    def kv_bytes(self, loads: Loads) -> np.ndarray:
        """Return the bytes of each document's buffer of K and V or states: [stages, documents].

        They are 0 for documents that later slices or other documents do not read.
        """
        rows = []
        for each in self.layout.coefficients:
            kept = loads.tail_tokens(each.window)
            if self.layout.profile.stores_last_slice and not each.window:
                kept = np.where(kept > 0, loads.lengths, 0.0)
            carried = each.kv_bytes_per_token * kept + each.border_bytes * loads.boundaries
            rows.append(carried / self.kv_shards(each))
        return np.ceil(self.layout.over_stages(rows))

    def kv_gradient_bytes(self, loads: Loads) -> np.ndarray:
        """Return the bytes of the gradients of :meth:`kv_bytes`: [stages, documents]."""
        rows = [self.layer_kv_gradient_bytes(each, loads) for each in self.layout.coefficients]
        return np.ceil(self.layout.over_stages(rows))

    def layer_kv_gradient_bytes(self, of: LayerCoefficients, loads: Loads) -> np.ndarray:
        """Return the bytes of the gradients of one layer's K and V or states: [documents]."""
        bytes_ = of.kv_gradient_bytes_per_token * loads.tail_tokens(of.window)
        bytes_ = bytes_ + of.border_gradient_bytes * loads.boundaries
        return bytes_ / self.kv_shards(of)

    def weight_input_bytes(self, loads: Loads) -> np.ndarray:
        """Return the bytes held from I to W: [stages, chunks]."""
        layers = [self.layer_weight_input_bytes(each, loads) for each in self.layout.coefficients]
        return np.ceil(self.layout.over_stages(layers) + self.ends.weight_input_bytes(loads))

    def layer_weight_input_bytes(self, of: LayerCoefficients, loads: Loads) -> np.ndarray:
        """Return the bytes that one layer holds from I to W, rows of its TP group included: [C]."""
        own = self.layout.bytes_of(of.weight_input_bytes, loads)
        return own + gathered_bytes(self.layout, of) * loads.tokens

    # --- while an op runs ------------------------------------------------------------------------

    def workspace_bytes(self, kind: Kind, loads: Loads) -> np.ndarray:
        """Return the additional bytes while ``kind`` runs, without recompute: [stages, chunks]."""
        layout = self.layout
        rows = [
            layout.workspace_of(each.workspace_bytes[kind], loads) for each in layout.coefficients
        ]
        held = layout.most_over_stages(rows)
        return np.ceil(held + self.ends.workspace_bytes(kind, loads))

    def forward_workspace_bytes(self, loads: Loads, counts: Counts) -> np.ndarray:
        """Return the additional bytes while F runs: [stages, chunks].

        They are the bytes of the layer of ``counts`` (by kind and recompute mode) that needs most,
        and of the LM head. A mode without a measurement counts like a layer that saves everything.
        """
        if not any(each.forward_workspace_bytes for each in self.layout.coefficients):
            return self.workspace_bytes(Kind.FORWARD, loads)
        held = np.zeros((self.layout.stages, loads.chunks))
        for (kind, mode), count in counts.items():
            of = self.layout.coefficients[kind]
            per = of.forward_workspace_bytes.get(mode, of.workspace_bytes[Kind.FORWARD])
            most = self.layout.workspace_of(per, loads)
            if mode in _WITHOUT_MLP and self._is_routed(of):
                most = most + self._routed(of, loads)
            held = np.maximum(held, np.where(count > 0, most, 0.0))
        return np.ceil(held + self.ends.workspace_bytes(Kind.FORWARD, loads))

    def recompute_workspace_bytes(self, choice: Choice, loads: Loads) -> np.ndarray:
        """Return the additional bytes of one layer that B or I recomputes: [chunks]."""
        kind, mode = choice
        if mode in (KEEP, OFFLOAD):
            return np.zeros(loads.chunks)
        of = self.layout.coefficients[kind]
        again = self.layout.bytes_of(of.recompute_workspace_bytes[mode], loads)
        if mode in _WITHOUT_MLP and self._is_routed(of):
            again = again + self._routed(of, loads)
        return np.ceil(again)

    # --- host memory -----------------------------------------------------------------------------

    def copy_seconds(self, loads: Loads, kind: int = 0) -> np.ndarray:
        """Return the seconds to copy one layer's saved bytes to or from host memory: [chunks]."""
        return self.saved_bytes((kind, KEEP), loads) / _host_rate(self.layout)

    def offloaded_workspace(self, op: Kind, loads: Loads, kind: int) -> np.ndarray:
        """Return the bytes that one offloaded layer adds on the device during ``op``: [chunks]."""
        layer = self.saved_bytes((kind, KEEP), loads)
        if op is Kind.INPUT:
            # Weight inputs of all layers count from the start of I, this layer's included.
            left = self.layer_weight_input_bytes(self.layout.coefficients[kind], loads)
            layer = np.maximum(layer - left, 0.0)
        return layer


def _host_rate(layout: StageLayout) -> float:
    rate = layout.profile.host_bytes_per_second
    if not rate:
        raise ValueError(
            f"the plan offloads layers (choice {OFFLOAD}), but the cost model of "
            f"{layout.profile.provenance.device} has no rate to the host's memory "
            "(host_bytes_per_second is 0): plan without the lever offload, or give that rate"
        )
    return rate
