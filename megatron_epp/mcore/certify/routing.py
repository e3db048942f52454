"""Notes of what a model's routers leave beside gradients: tokens per expert, losses for the log."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_epp.certify.routed import RoutingRecord
from megatron_epp.mcore.kinds.moe.router import logged_number, moe_layers


class RoutingNotes:
    """Notes what the routers of ``models``, parts of one, leave, one iteration after the other."""

    def __init__(self, *models: Any):
        self.models = models
        self._counts: dict[int, numpy.ndarray] = {}

    def before(self, finalize: Callable[..., None]) -> Callable[..., None]:
        """``finalize``, Megatron's finalize_model_grads, with the counts noted that it resets."""

        def noting(*args: Any, **others: Any) -> None:
            self.note_counts()
            finalize(*args, **others)

        return noting

    def note_counts(self) -> None:
        """As they are now."""
        self._counts = {
            logged_number(layer): layer.router.local_tokens_per_expert.double().cpu().numpy()
            for model in self.models
            for _, layer in moe_layers(model)
            if layer.router.enable_expert_bias
        }

    def taken(self, extra_losses: Mapping[str, numpy.ndarray] | None = None) -> RoutingRecord:
        """Routing noted since the last call; among its losses those of ``extra_losses`` tokens, as
        a rank reports them, or as Megatron's log holds them."""
        tracker = get_moe_metrics_tracker()
        losses = {
            name: entry.values.cpu().numpy().copy()
            for name, entry in tracker.metrics.items()
            if entry.values.any()
        }
        tracker.clear()
        counts, self._counts = self._counts, {}
        return RoutingRecord(counts, losses | _mtp_losses() | dict(extra_losses or {}))


def _mtp_losses() -> dict[str, numpy.ndarray]:
    """Losses of further tokens that Megatron has noted for its log since the last call, summed over
    micro-batches, by their names there."""
    values = MTPLossLoggingHelper.tracker.get("loss_values", ())
    losses = {
        f"mtp_{depth} loss": value[None].cpu().numpy().copy()
        for depth, value in enumerate(values, 1)
    }
    MTPLossLoggingHelper.tracker.clear()
    return losses
