"""Records of MoE routing in an iteration: tokens per expert, and logged auxiliary losses."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_epp.certify.trainer_results import RoutingRecord
from megatron_epp.mcore.kinds.moe.router import logged_number, moe_layers


class RoutingNotes:
    """Recorder of the routers' token counts and logged losses of ``models`` in each iteration."""

    def __init__(self, *models: Any):
        self.models = models
        self._counts: dict[int, numpy.ndarray] = {}

    def before(self, finalize: Callable[..., None]) -> Callable[..., None]:
        """Return ``finalize`` (finalize_model_grads) preceded by a record of the token counts.

        Megatron's finalize_model_grads resets the counts.
        """

        def noting(*args: Any, **others: Any) -> None:
            self.note_counts()
            finalize(*args, **others)

        return noting

    def note_counts(self) -> None:
        """Record the current numbers of tokens per expert."""
        self._counts = {
            logged_number(layer): layer.router.local_tokens_per_expert.double().cpu().numpy()
            for model in self.models
            for _, layer in moe_layers(model)
            if layer.router.enable_expert_bias
        }

    def taken(self, extra_losses: Mapping[str, numpy.ndarray] | None = None) -> RoutingRecord:
        """Return the routing since the last call of this method, and reset the records.

        The losses are Megatron's logged losses and ``extra_losses``.
        """
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
    """Return the MTP losses that Megatron has logged since the last call, by name.

    The losses are sums over micro-batches.
    """
    values = MTPLossLoggingHelper.tracker.get("loss_values", ())
    losses = {
        f"mtp_{depth} loss": value[None].cpu().numpy().copy()
        for depth, value in enumerate(values, 1)
    }
    MTPLossLoggingHelper.tracker.clear()
    return losses
