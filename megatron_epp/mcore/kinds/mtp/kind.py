"""Multi-token prediction (MTP) in Megatron's flags."""

from typing import Any, ClassVar, override

from megatron_epp.cost.kinds.mtp import MTPPart
from megatron_epp.mcore.hybrid.segments import layout_symbols
from megatron_epp.mcore.kinds.base import LayerKind
from megatron_epp.mcore.kinds.limit import Limit, is_set

_BY_EXPERTS_IN_FP8 = ("mtp_num_layers", "num_experts", "fp8")


def mtp_depths(args: Any) -> int:
    """Return the number of MTP modules."""
    return getattr(args, "mtp_num_layers", None) or 0


def _tied_over_stages(args: Any) -> bool:
    if not mtp_depths(args) or args.pipeline_model_parallel_size == 1:
        return False
    return not args.untie_embeddings_and_output_weights


def _elsewhere(args: Any) -> bool:
    """Return whether MTP layers are on earlier stages of a layout, or alone on the last stage."""
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if not mtp_depths(args) or layout is None:
        return False
    last = layout_symbols(str(layout))[-1]
    return last.count("m") != mtp_depths(args) or "t" not in last


class MTPKind(LayerKind):
    """MTP: --mtp-num-layers, or / in --hybrid-layer-pattern. No decoder layer has this kind."""

    PRICED, NAME = MTPPart, "multi-token prediction"
    ABSENT: ClassVar = {"predicts": False}
    LIMITS: tuple[Limit, ...] = (
        Limit(
            "MTP in slices of external loops (--mtp-num-layers)",
            "use Megatron's own schedule, without attach",
            slices={"mtp_num_layers": "multi-token prediction"},
        ),
        Limit(
            "MTP with tied embeddings over several stages (--mtp-num-layers)",
            "give --untie-embeddings-and-output-weights: Megatron checkpoints of such models fail",
            _tied_over_stages,
        ),
        Limit(
            "MTP with MoE in fp8 (--mtp-num-layers, --num-experts, --fp8-format)",
            "train in bf16",
            lambda args: all(is_set(args, name) for name in _BY_EXPERTS_IN_FP8),
        ),
        Limit(
            "MTP layers that are not on the last stage, or on a last stage without decoder layers "
            "(m in --pipeline-model-parallel-layout)",
            "place every m after a t and before the L",
            _elsewhere,
        ),
        Limit(
            "MTP: hidden states of several predictions mixed at random (--mtp-hsm)",
            "leave it out: each MTP layer continues the one before it",
            "mtp_hsm",
        ),
        Limit(
            "MTP losses without gradients of the LM head, with vocabulary parallelism "
            "(--mtp-detach-heads, --epp-vocab-parallel on)",
            "leave one of the two out",
            lambda args: (
                bool(getattr(args, "mtp_detach_heads", False))
                and getattr(args, "epp_vocab_parallel", None) == "on"
            ),
        ),
    )

    @override
    def layers(self, args: Any) -> tuple[bool, ...]:
        return (False,) * args.num_layers

    @override
    def unshared(self, holder: Any, ahead: bool) -> str:
        predicts = mtp_depths(holder) and not ahead
        return "MTP, which predicts after whole documents" if predicts else ""

    @override
    def words(self, args: Any) -> list[str]:
        return [f"MTP of depth {mtp_depths(args)}"] * bool(mtp_depths(args))
