"""DeepSeek sparse attention (DSA) in Megatron's flags."""

import math
from importlib.util import find_spec
from typing import Any, ClassVar, override

from megatron_epp.cost.kinds.dsa import DSAPart
from megatron_epp.layers.attention.layer_attention import Heads
from megatron_epp.mcore.kinds.base import layers_with
from megatron_epp.mcore.kinds.limit import Limit
from megatron_epp.mcore.kinds.mla.kind import MLAKind
from megatron_epp.mcore.patching import cpu_host

_SIZES = ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk")


def asks_for_dsa(args: Any) -> bool:
    """Return whether ``args``, which may be incomplete, select DSA layers."""
    variant = getattr(args, "experimental_attention_variant", None)
    pattern = getattr(args, "hybrid_layer_pattern", None) or ""
    return variant in DSAKind.VARIANTS or DSAKind.SYMBOL in pattern


def _where(asked: Any) -> Any:
    """Return a test that is true for ``args`` with DSA layers that also pass the test ``asked``."""
    return lambda args: asks_for_dsa(args) and bool(asked(args))


class DSAKind(MLAKind):
    """DSA: --experimental-attention-variant dsa, or the layer symbol D of a HybridModel."""

    PRICED, NAME, SYMBOL = DSAPart, "sparse attention", "D"
    VARIANTS, SLICED = ("dsa",), False
    ABSENT: ClassVar = {}
    STACK = "dsa_layer"
    FLAGS: ClassVar = {}
    LIMITS = (
        Limit(
            "DSA over context-parallel (CP) ranks (--context-parallel-size)",
            "leave it out: long documents are cut into slices instead",
            _where(lambda args: args.context_parallel_size > 1),
        ),
        Limit(
            "DSA with other kernels (--dsa-kernel-backend tilelang, cudnn)",
            "leave it out: slices use torch matmuls",
            _where(lambda args: getattr(args, "dsa_kernel_backend", "none") != "none"),
        ),
        Limit(
            "DSA: several layers that share selected keys (--dsa-indexer-topk-freq above 1)",
            "leave it out: every layer selects its own keys",
            _where(lambda args: (getattr(args, "dsa_indexer_topk_freq", 1) or 1) > 1),
        ),
        Limit(
            "DSA in fp8 (--fp8-format)",
            "train in bf16",
            _where(lambda args: getattr(args, "fp8", None)),
        ),
        Limit(
            "MTP with DSA in a GPTModel (--mtp-num-layers)",
            "use a HybridModel with a pattern such as D-D-/D-: Megatron builds no such MTP layer "
            "in a GPTModel",
            _where(
                lambda args: (
                    getattr(args, "mtp_num_layers", None)
                    and not getattr(args, "hybrid_layer_pattern", None)
                )
            ),
        ),
        Limit(
            "DSA within a sliding window (--window-size)",
            "leave it out",
            _where(lambda args: getattr(args, "window_size", None)),
        ),
    )

    @override
    def layers(self, args: Any) -> tuple[bool, ...]:
        if getattr(args, "hybrid_layer_pattern", None):
            return layers_with(args, self.SYMBOL)
        return (asks_for_dsa(args),) * args.num_layers

    @override
    def sizes(self, args: Any) -> dict[str, Any]:
        among = getattr(args, "dsa_indexer_use_sparse_loss", False)
        return super().sizes(args) | {
            "index_heads": args.dsa_indexer_n_heads,
            "index_size": args.dsa_indexer_head_dim,
            "chosen_keys": args.dsa_indexer_topk,
            "taught_on_all": indexer_learns(args) and not among,
        }

    @override
    def model_sizes(self, args: Any) -> dict[str, Any]:
        return {}  # MLA's

    def defaults(self, wanted: Any) -> dict[str, Any]:
        """Disable the Hadamard matrix on CPU-only hosts, which lack its kernel."""
        lacks = asks_for_dsa(wanted) and cpu_host.is_cpu_host()
        return {"dsa_indexer_rotate_activation": False} if lacks else {}

    @override
    def words(self, args: Any) -> list[str]:
        if not asks_for_dsa(args):
            return []
        heads = f"{args.dsa_indexer_n_heads} heads of {args.dsa_indexer_head_dim}"
        return [f"indexer of {heads}, {args.dsa_indexer_topk} keys of a query"]

    @override
    def require(self, args: Any, tp: int) -> None:
        if not asks_for_dsa(args):
            return
        for name in _SIZES:
            size = getattr(args, name, None)
            if size is None or size < 1:
                flag, why = "--" + name.replace("_", "-"), "is missing" if size is None else size
                raise ValueError(f"{flag} {why}: sparse attention expects at least 1")
        taught = getattr(args, "dsa_indexer_loss_coeff", None)
        if taught is not None and not 0 <= taught < math.inf:
            raise ValueError(
                f"--dsa-indexer-loss-coeff {taught}: expected a finite number of at least 0"
            )
        rotary = args.qk_pos_emb_head_dim
        if args.dsa_indexer_head_dim < rotary:
            raise ValueError(
                f"--dsa-indexer-head-dim {args.dsa_indexer_head_dim}: expected at least "
                f"--qk-pos-emb-head-dim, {rotary}"
            )
        if not getattr(args, "multi_latent_attention", False) and "D" not in (
            getattr(args, "hybrid_layer_pattern", None) or ""
        ):
            raise ValueError(
                f"--experimental-attention-variant {self.VARIANTS[0]}: "
                "expected --multi-latent-attention"
            )
        if getattr(args, "add_bias_linear", False):
            raise ValueError(
                "sparse attention: its linears have no bias; give --disable-bias-linear"
            )
        if tp > 1 and not args.sequence_parallel:
            raise ValueError(
                f"sparse attention over --tensor-model-parallel-size {tp}: give --sequence-parallel"
            )
        if getattr(args, "qk_layernorm", False) and args.q_lora_rank is None:
            raise ValueError(
                "sparse attention with --qk-layernorm: its queries have a norm of their latent "
                "alone; give --q-lora-rank"
            )

    @override
    def refuse(self, args: Any) -> None:
        self.require(args, args.tensor_model_parallel_size)
        if not asks_for_dsa(args):
            return
        turned = getattr(args, "dsa_indexer_rotate_activation", True)
        if turned and find_spec("fast_hadamard_transform") is None:
            raise ValueError(
                "sparse attention: fast_hadamard_transform is missing; pip install "
                "fast-hadamard-transform, or give --no-dsa-indexer-rotate-activation"
            )

    @override
    def unfit_pattern(self, args: Any, symbols: str) -> str | None:
        if self.SYMBOL not in symbols or MLAKind.SYMBOL not in symbols:
            return None
        return (
            f"latent attention ({MLAKind.SYMBOL}) and sparse attention ({self.SYMBOL}) in "
            "one model; expected one of the two"
        )

    @override
    def unshared(self, holder: Any, ahead: bool) -> str:
        losses = "the losses of an indexer, one of every document's rows"
        return losses if indexer_learns(holder) else ""

    @override
    def heads(self, config: Any, context: int) -> Heads | None:
        return None  # MLA's


def indexer_learns(holder: Any) -> bool:
    """Return whether the indexer has a loss; ``holder`` is args or the model's configuration."""
    return asks_for_dsa(holder) and bool(getattr(holder, "dsa_indexer_loss_coeff", None))
