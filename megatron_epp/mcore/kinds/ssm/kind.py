"""SSM and linear-attention layers in Megatron's flags: Mamba-2, gated delta net."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, ClassVar, override

from megatron_epp.cost.kinds.ssm import GatedDeltaNetPart, MambaPart
from megatron_epp.mcore.kinds.base import LayerKind, mask_of_layers
from megatron_epp.mcore.kinds.limit import Limit
from megatron_epp.mcore.patching import cpu_host


def _variant(args: Any) -> str | None:
    return getattr(args, "experimental_attention_variant", None)


class SSMKind(LayerKind):
    """SSM or linear-attention layer.

    Attributes:
        PACKAGES: Packages that contain the kernels -> their names on PyPI.
        HEADS: Field of LayerShape for the number of heads.
    """

    PACKAGES: ClassVar[dict[str, str]] = {}
    HEADS: ClassVar[str]
    SINCE = (0, 19)

    def asked(self, args: Any) -> bool:
        """Return whether ``args``, which may be incomplete, select layers of this kind."""
        return self.SYMBOL in (getattr(args, "hybrid_layer_pattern", None) or "")

    def counts(self, args: Any) -> tuple[int, int]:
        """Return the numbers (heads, groups); the heads of a group share their keys."""
        raise NotImplementedError

    def state_sizes(self, args: Any) -> tuple[int, int]:
        """Return the channels of a key and of a value of a head."""
        raise NotImplementedError

    @override
    def sizes(self, args: Any) -> dict[str, Any]:
        (heads, groups), (keys, values) = self.counts(args), self.state_sizes(args)
        return {
            self.HEADS: heads,
            "state_groups": groups,
            "state_keys": keys,
            "state_values": values,
        }

    @override
    def words(self, args: Any) -> list[str]:
        if not self.asked(args):
            return []
        (heads, groups), (keys, values) = self.counts(args), self.state_sizes(args)
        return [f"{self.NAME} of {heads} heads in {groups} groups, states of {keys} by {values}"]

    def require(self, args: Any, tp: int) -> None:
        """Raise a ValueError unless heads and groups divide over ``tp`` tensor-parallel ranks.

        The heads must also divide into the groups, and the heads and groups of each tensor-parallel
        rank over the context-parallel ranks (:meth:`shares`).
        """
        if not self.asked(args):
            return
        heads, groups = self.counts(args)
        if heads < 1 or groups < 1 or heads % groups:
            raise ValueError(f"{self.NAME}: {heads} heads do not divide into {groups} groups")
        cp = args.context_parallel_size
        if groups % tp or heads % (tp * cp) or not self.shares(groups // tp, cp):
            raise ValueError(
                f"{self.NAME}: {heads} heads in {groups} groups do not divide over "
                f"--tensor-model-parallel-size {tp} and --context-parallel-size {cp}; expected "
                "multiples"
            )

    def shares(self, groups: int, cp: int) -> bool:
        """Return whether ``groups`` of one tensor-parallel rank can be split over ``cp`` ranks."""
        return not groups % cp

    @override
    def refuse(self, args: Any) -> None:
        self.require(args, args.tensor_model_parallel_size)
        lacking = [name for name in self.PACKAGES if find_spec(name) is None]
        if lacking and self.asked(args) and not cpu_host.is_cpu_host():
            wheels = " ".join(self.PACKAGES[name] for name in lacking)
            raise ValueError(f"{self.NAME} layers: {wheels} is missing; pip install {wheels}")


class MambaKind(SSMKind):
    """Mamba-2, which only HybridModels have."""

    PRICED, NAME, SYMBOL, SLOT = MambaPart, "Mamba", "M", "mixer"
    HEADS = "mamba_heads"
    TIMED: ClassVar = {"layernorm": "norm"}
    STACK = "mamba_layer"
    PACKAGES: ClassVar = {"mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d"}
    LIMITS = (
        Limit(
            "Mamba's scan without its fused kernel (--disable-mamba-mem-eff-path)",
            "leave it out: without the fused kernel, Megatron does not train packed documents "
            "either",
            lambda args: not getattr(args, "use_mamba_mem_eff_path", True),
        ),
    )

    @override
    def layers(self, args: Any) -> tuple[bool, ...]:
        if not getattr(args, "hybrid_layer_pattern", None):
            return (False,) * args.num_layers
        return super().layers(args)

    @override
    def counts(self, args: Any) -> tuple[int, int]:
        heads = args.mamba_num_heads or 2 * args.hidden_size // args.mamba_head_dim
        return heads, args.mamba_num_groups

    @override
    def state_sizes(self, args: Any) -> tuple[int, int]:
        return args.mamba_state_dim, args.mamba_head_dim

    @override
    def shares(self, groups: int, cp: int) -> bool:
        return not (groups % cp and cp % groups)


class GatedDeltaNetKind(SSMKind):
    """Gated delta net: in a HybridModel, or instead of attention in some layers of a GPTModel.

    For a GPTModel, the flags are --experimental-attention-variant gated_delta_net (gdn in later
    versions of Megatron) and --linear-attention-freq.
    """

    PRICED, NAME, SYMBOL, SLOT = GatedDeltaNetPart, "gated delta net", "G", "self_attention"
    HEADS = "delta_heads"
    VARIANTS = ("gated_delta_net", "gdn")
    TIMED: ClassVar = {"layernorm": "input_layernorm"}
    STACK = "gdn_layer"
    PACKAGES: ClassVar = {"fla": "flash-linear-attention"}
    LIMITS = (
        Limit(
            "gated delta nets: tensor parallelism without sequence parallelism",
            "give --sequence-parallel: without it, Megatron does not sum the gradients of their "
            "norm",
            lambda args: (
                GatedDeltaNetKind().asked(args)
                and args.tensor_model_parallel_size > 1
                and not args.sequence_parallel
            ),
        ),
    )

    @override
    def asked(self, args: Any) -> bool:
        return _variant(args) in self.VARIANTS or super().asked(args)

    @override
    def layers(self, args: Any) -> tuple[bool, ...]:
        if getattr(args, "hybrid_layer_pattern", None):
            return super().layers(args)
        if _variant(args) not in self.VARIANTS:
            return (False,) * args.num_layers
        every = args.linear_attention_freq
        if every is None:
            raise ValueError(
                f"--experimental-attention-variant {_variant(args)}: --linear-attention-freq is "
                "missing; expected N, so that each N-th layer has attention, or 1 or 0 for each "
                "layer"
            )
        if isinstance(every, int):
            return tuple(number % every != 0 for number in range(1, args.num_layers + 1))
        return mask_of_layers("--linear-attention-freq", every, args.num_layers)

    @override
    def counts(self, args: Any) -> tuple[int, int]:
        return args.linear_num_value_heads, args.linear_num_key_heads

    @override
    def state_sizes(self, args: Any) -> tuple[int, int]:
        return args.linear_key_head_dim, args.linear_value_head_dim

    @override
    def sizes(self, args: Any) -> dict[str, Any]:
        return {"attention": False, **super().sizes(args)}

    @override
    def in_layers(self, args: Any, mask: Sequence[bool]) -> dict[str, Any]:
        if _variant(args) not in self.VARIANTS:
            return {}
        return {"linear_attention_freq": [int(there) for there in mask]}
