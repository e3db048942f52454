"""DeepSeek's sparse attention, in Megatron."""

import math
from importlib.util import find_spec
from typing import Any, ClassVar

from megatron_epp.cost.kinds.sparse import SparsePart
from megatron_epp.mcore.flags.config import AUTO
from megatron_epp.mcore.model.kinds.base import LayerPlace
from megatron_epp.mcore.model.kinds.latents import MegatronLatents
from megatron_epp.mcore.model.kinds.self_attention import SPARSE
from megatron_epp.mcore.model.limit import Limit
from megatron_epp.mcore.patching import cpu_host

# Of small models. So many heads that a score of exactly 0, which ties, needs all of them negative;
# so few keys that most queries have to choose, and drawn slices are shorter and longer.
MOST_HEADS, MOST_KEYS = 32, 7
_SIZES = ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk")


def _asked(args: Any) -> bool:
    """Whether flags, however few of them there are, ask for such layers."""
    pattern = getattr(args, "hybrid_layer_pattern", None) or ""
    return getattr(args, "experimental_attention_variant", None) == SPARSE or "D" in pattern


def _where(asked: Any) -> Any:
    """The same asked of models with such layers alone."""
    return lambda args: _asked(args) and bool(asked(args))


class MegatronSparse(MegatronLatents):
    """--experimental-attention-variant dsa with --multi-latent-attention, D of a HybridModel.

    Scaled down besides the latents' sizes are the indexer's channels, and its heads and chosen keys
    where they are many. In a small model nothing is turned by a Hadamard matrix, queries and keys
    alike, which the scores do not notice.
    """

    PRICED, NAME, LETTER, LETTERS = SparsePart, "sparse attention", "D", ""
    ABSENT: ClassVar = {}
    STACK = "dsa_layer"
    FLAGS: ClassVar = {}
    CHOICE, VALUES = "", ()
    LIMITS = (
        Limit(
            "sparse attention over context-parallel ranks (--context-parallel-size)",
            "leave it out: slices of long documents take their place",
            _where(lambda args: args.context_parallel_size > 1),
        ),
        Limit(
            "sparse attention by kernels of their own (--dsa-kernel-backend tilelang, cudnn)",
            "leave it out: slices are computed by torch's products",
            _where(lambda args: getattr(args, "dsa_kernel_backend", "none") != "none"),
        ),
        Limit(
            "keys chosen once for several layers (--dsa-indexer-topk-freq above 1)",
            "leave it out: every layer chooses its own",
            _where(lambda args: (getattr(args, "dsa_indexer_topk_freq", 1) or 1) > 1),
        ),
        Limit(
            "sparse attention in fp8 (--fp8-format)",
            "train in bf16",
            _where(lambda args: getattr(args, "fp8", None)),
        ),
        Limit(
            "further tokens predicted by sparse attention in a GPTModel (--mtp-num-layers)",
            "give a HybridModel's pattern, D-D-/D-: Megatron builds no such depth of a GPTModel",
            _where(
                lambda args: (
                    getattr(args, "mtp_num_layers", None)
                    and not getattr(args, "hybrid_layer_pattern", None)
                )
            ),
        ),
        Limit(
            "sparse attention within a window (--window-size)",
            "leave it out",
            _where(lambda args: getattr(args, "window_size", None)),
        ),
    )

    def layers(self, args: Any) -> tuple[bool, ...]:
        if getattr(args, "hybrid_layer_pattern", None):
            return super(MegatronLatents, self).layers(args)
        return (_asked(args),) * args.num_layers

    def sizes(self, args: Any) -> dict[str, Any]:
        among = getattr(args, "dsa_indexer_use_sparse_loss", False)
        return super().sizes(args) | {
            "index_heads": args.dsa_indexer_n_heads,
            "index_size": args.dsa_indexer_head_dim,
            "chosen_keys": args.dsa_indexer_topk,
            "taught_on_all": _learns(args) and not among,
        }

    def model_sizes(self, args: Any) -> dict[str, Any]:
        return {}  # the latents' part says them

    def defaults(self, wanted: Any) -> dict[str, Any]:
        """On hosts without a GPU no Hadamard matrix, whose kernel they lack: the scores are the
        same."""
        lacks = _asked(wanted) and cpu_host.is_cpu_host()
        return {"dsa_indexer_rotate_activation": False} if lacks else {}

    def words(self, args: Any) -> list[str]:
        if not _asked(args):
            return []
        heads = f"{args.dsa_indexer_n_heads} heads of {args.dsa_indexer_head_dim}"
        return [f"indexer of {heads}, {args.dsa_indexer_topk} keys of a query"]

    def small_words(self, args: Any) -> list[str]:
        taught = f"taught by {args.dsa_indexer_loss_coeff}" if _learns(args) else "not taught"
        of = " of the chosen keys" * bool(_learns(args) and args.dsa_indexer_use_sparse_loss)
        return [f"{words}, {taught}{of}" for words in self.words(args)]

    def require(self, args: Any, tp: int) -> None:
        if not _asked(args):
            return
        for name in _SIZES:
            size = getattr(args, name, None)
            if size is None or size < 1:
                flag, said = "--" + name.replace("_", "-"), "is missing" if size is None else size
                raise ValueError(f"{flag} {said}: sparse attention expects at least 1")
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
                f"--experimental-attention-variant {SPARSE}: expected --multi-latent-attention"
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

    def refuse(self, args: Any) -> None:
        self.require(args, args.tensor_model_parallel_size)
        if not _asked(args):
            return
        if (keeps := getattr(args, "epp_mla_keeps", AUTO)) != AUTO:
            raise ValueError(
                f"--epp-mla-keeps {keeps}: sparse attention attends in latents, and keeps them; "
                "leave the flag out"
            )
        turned = getattr(args, "dsa_indexer_rotate_activation", True)
        if turned and find_spec("fast_hadamard_transform") is None:
            raise ValueError(
                "sparse attention: fast_hadamard_transform is missing; pip install "
                "fast-hadamard-transform, or give --no-dsa-indexer-rotate-activation"
            )

    def unfit_pattern(self, args: Any, letters: str) -> str | None:
        if self.LETTER not in letters or MegatronLatents.LETTER not in letters:
            return None
        return (
            f"latent attention ({MegatronLatents.LETTER}) and sparse attention ({self.LETTER}) in "
            "one model; expected one of the two"
        )

    def small(
        self, args: Any, hidden: int, tp: int, head_size: int, step: int = 1
    ) -> dict[str, Any]:
        if not _asked(args):
            return {}
        self.require(args, tp)
        latents = super().small(args, hidden, tp, head_size, step)
        rotary = latents["qk_pos_emb_head_dim"]
        wanted = round(args.dsa_indexer_head_dim / args.qk_pos_emb_head_dim * rotary)
        return {
            "dsa_indexer_n_heads": min(args.dsa_indexer_n_heads, MOST_HEADS),
            "dsa_indexer_head_dim": max(rotary, wanted),
            "dsa_indexer_topk": min(args.dsa_indexer_topk, MOST_KEYS),
            "dsa_indexer_rotate_activation": False,
        }

    def without_ties(self, small: Any) -> dict[str, Any]:
        """Every key is chosen: of two that score about the same, rounding chooses."""
        return {"dsa_indexer_topk": small["seq_length"]} if "dsa_indexer_topk" in small else {}

    def weighs_besides(self, holder: Any) -> bool:
        return _learns(holder)

    def unshared(self, holder: Any) -> str:
        return "the losses of an indexer, one of every document's rows" if _learns(holder) else ""

    def weigh_losses(self, scale: Any) -> None:
        from megatron.core.transformer.experimental_attention_variant.dsa import (
            DSAIndexerLossAutoScaler,
        )

        DSAIndexerLossAutoScaler.set_loss_scale(scale)

    def prepare(self, config: Any) -> None:
        """Have stages without such layers take part in what is logged of their losses."""
        if not _learns(config):
            return
        import torch
        from megatron.core.transformer.experimental_attention_variant.dsa import (
            DSAIndexerLossLoggingHelper,
        )

        logged = DSAIndexerLossLoggingHelper.tracker
        if len(logged.get("values", ())) != config.num_layers:
            logged["values"] = torch.zeros(config.num_layers, device=torch.cuda.current_device())

    def excluded(self, model: Any, attention: Any) -> dict[str, str]:
        return {}

    def local_layer(self, config: Any) -> Any:
        from megatron_epp.mcore.model.local_sparse import sparse_alone

        return sparse_alone(config)

    def local_block(self, config: Any, vp_stage: int | None) -> Any:
        from megatron_epp.mcore.model.local_sparse import sparse_block

        if config.experimental_attention_variant != SPARSE:
            return None
        return sparse_block(config, vp_stage)

    def mend_local(self, layer: Any, config: Any) -> None:
        """Its own description lacks nothing."""

    def heads(self, config: Any, context: int) -> Any:
        return None  # the latents' part says them

    def holds(self, module: Any) -> bool:
        from megatron.core.transformer.experimental_attention_variant.absorbed_mla import (
            AbsorbedMLASelfAttention,
        )

        return isinstance(module, AbsorbedMLASelfAttention)

    def install(self, place: LayerPlace) -> None:
        from megatron_epp.mcore.model.sparse_attention import install_sparse

        install_sparse(place)

    def elastic(self, layer: Any) -> Any:
        return layer.self_attention.core_attention.forward.__self__

    def kept_shapes(self, layer: Any, context: int) -> tuple[tuple[int, ...], ...]:
        config = layer.config
        key = config.kv_lora_rank + config.qk_pos_emb_head_dim
        return (context, 1, key), (context, 1, config.dsa_indexer_head_dim)


def _learns(holder: Any) -> bool:
    """Whether the indexer has a loss; ``holder``: flags, or a model's configuration."""
    return _asked(holder) and bool(getattr(holder, "dsa_indexer_loss_coeff", None))
