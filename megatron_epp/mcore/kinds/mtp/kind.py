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

    PRICED, NAME = MTPPart, "prediction of further tokens"
    ABSENT: ClassVar = {"predicts": False}
    LIMITS: tuple[Limit, ...] = (
        Limit(
            "slices in loops of models that predict further tokens (--mtp-num-layers)",
            "use Megatron's own schedule (no attach)",
            slices={"mtp_num_layers": "multi-token prediction"},
        ),
        Limit(
            "further tokens predicted with tied embeddings over several stages (--mtp-num-layers)",
            "give --untie-embeddings-and-output-weights: Megatron's own checkpoints fail with them",
            _tied_over_stages,
        ),
        Limit(
            "further tokens predicted by experts in fp8 (--mtp-num-layers, --num-experts, "
            "--fp8-format): Megatron moves the mask of padding with the tokens, so its routers "
            "count other rows there",
            "train in bf16",
            lambda args: all(is_set(args, name) for name in _BY_EXPERTS_IN_FP8),
        ),
        Limit(
            "layers that predict further tokens on another stage than the last, or alone there "
            "(m in --pipeline-model-parallel-layout)",
            "place all m in front of the L, behind a t",
            _elsewhere,
        ),
        Limit(
            "hidden states of several predictions mixed at random (--mtp-hsm)",
            "leave it out: each prediction begins with the one before it",
            "mtp_hsm",
        ),
        Limit(
            "further tokens whose losses leave the output layer alone, with its words over the "
            "stages (--mtp-detach-heads, --epp-vocab-parallel on)",
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
        return "further tokens, predicted behind whole documents" if predicts else ""

    @override
    def words(self, args: Any) -> list[str]:
        return [f"{mtp_depths(args)} further tokens predicted"] * bool(mtp_depths(args))
