"""Records of an iteration: tokens per expert, and logged auxiliary and MTP losses."""

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
        self._mtp: dict[str, numpy.ndarray] = {}

    def before(self, finalize: Callable[..., None]) -> Callable[..., None]:
        """Return a function that records the token counts, then calls ``finalize``.

        ``finalize`` is Megatron's finalize_model_grads, which resets the counts.
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

    def note_mtp(self, mask_T: numpy.ndarray) -> None:
        """Add a document's MTP losses to the recorded sums; Megatron has just logged their means.

        Args:
            mask_T: [tokens] Loss mask of the document.
        """
        for depth, mean in enumerate(MTPLossLoggingHelper.tracker.get("loss_values", ()), 1):
            name, targets = f"mtp_{depth} loss", mask_T[depth:].sum(dtype=numpy.float64)
            self._mtp[name] = self._mtp.get(name, 0.0) + mean[None].cpu().numpy() * targets
        MTPLossLoggingHelper.tracker.clear()

    def taken(self, extra_losses: Mapping[str, numpy.ndarray] | None = None) -> RoutingRecord:
        """Return the token counts and losses since the last call of this method, and reset them.

        The losses are Megatron's logged auxiliary losses, the MTP losses that :meth:`note_mtp`
        added, and ``extra_losses``.
        """
        tracker = get_moe_metrics_tracker()
        losses = {
            name: entry.values.cpu().numpy().copy()
            for name, entry in tracker.metrics.items()
            if entry.values.any()
        }
        tracker.clear()
        counts, self._counts = self._counts, {}
        mtp, self._mtp = self._mtp, {}
        return RoutingRecord(counts, losses | mtp | dict(extra_losses or {}))
