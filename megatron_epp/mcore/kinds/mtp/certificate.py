"""Multi-token prediction in certificates."""

from typing import Any, override

from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from megatron_epp.mcore.hybrid.pattern import MTP_SEPARATOR
from megatron_epp.mcore.kinds.certificate_base import LayerCertificate
from megatron_epp.mcore.kinds.mtp.kind import MTPKind, mtp_depths


class MTPCertificate(LayerCertificate):
    """Certificate of MTP layers."""

    KIND = MTPKind()

    @override
    def read_pattern(self, args: Any, symbols: str) -> None:
        if MTP_SEPARATOR in symbols:
            args.mtp_num_layers = symbols.count(MTP_SEPARATOR)

    @override
    def small_words(self, args: Any) -> list[str]:
        repeated = " by one repeated layer" * bool(getattr(args, "mtp_use_repeated_layer", False))
        return [f"MTP of depth {mtp_depths(args)}{repeated}"] * bool(mtp_depths(args))

    @override
    def weigh_losses(self, scale: Any) -> None:
        MTPLossAutoScaler.set_loss_scale(scale)
