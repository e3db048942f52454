"""Layers with a state, in Megatron: Mamba-2 and the gated delta net."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, ClassVar

from megatron_epp.cost.kinds.ssm import GatedDeltaNetPart, MambaPart
from megatron_epp.mcore.kinds.base import LayerKind, LayerPlace, mask_of_layers
from megatron_epp.mcore.kinds.limit import Limit
from megatron_epp.mcore.patching import cpu_host

# Of small models: neither alike nor powers of two, so that nothing fits by accident.
SMALL_KEYS, SMALL_VALUES = 6, 4
STATE_GROUPS = 2
MOST_STATE_HEADS = 4
DELTA = "gated_delta_net"


class SSMKind(LayerKind):
    """A layer with a state, of either kind.

    PACKAGES   that its kernels come from
    """

    PACKAGES: ClassVar[dict[str, str]] = {}

    def asked(self, args: Any) -> bool:
        """Whether flags, however few of them there are, ask for such layers."""
        return self.LETTER in (getattr(args, "hybrid_layer_pattern", None) or "")

    def counts(self, args: Any) -> tuple[int, int]:
        """(heads, groups of them that share keys)."""
        raise NotImplementedError

    def state_sizes(self, args: Any) -> tuple[int, int]:
        """Channels of a key and of a value of a head."""
        raise NotImplementedError

    def words(self, args: Any) -> list[str]:
        if not self.asked(args):
            return []
        (heads, groups), (keys, values) = self.counts(args), self.state_sizes(args)
        return [f"{self.NAME} of {heads} heads in {groups} groups, states of {keys} by {values}"]

    def small_words(self, args: Any) -> list[str]:
        return self.words(args)

    def require(self, args: Any, tp: int) -> None:
        """Raise a ValueError unless heads and groups divide over ``tp`` ranks and, in each, over
        the context-parallel ones."""
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
        """Whether a tensor-parallel rank's ``groups`` divide over ``cp`` ranks."""
        return not groups % cp

    def refuse(self, args: Any) -> None:
        self.require(args, args.tensor_model_parallel_size)
        lacking = [name for name in self.PACKAGES if find_spec(name) is None]
        if lacking and self.asked(args) and not cpu_host.is_cpu_host():
            wheels = " ".join(self.PACKAGES[name] for name in lacking)
            raise ValueError(f"{self.NAME} layers: {wheels} is missing; pip install {wheels}")

    def small_heads(self, args: Any, tp: int) -> tuple[int, int]:
        """(heads, groups) of a small model: few of both, in the same ratio up to 4."""
        self.require(args, tp)
        heads, groups = self.counts(args)
        cp = args.context_parallel_size
        counts = range(min(STATE_GROUPS, groups // tp), groups // tp + 1)
        few = next((count for count in counts if self.shares(count, cp)), groups // tp)
        ratios = range(min(heads // groups, MOST_STATE_HEADS), heads // groups + 1)
        ratio = next((ratio for ratio in ratios if not few * ratio % cp), heads // groups)
        return few * ratio * tp, few * tp


class MambaKind(SSMKind):
    """Mamba-2, of a HybridModel alone.

    Scaled down are heads, groups and sizes of states. Kept: heads of a group, up to 4.
    """

    PRICED, NAME, LETTER, SLOT = MambaPart, "Mamba", "M", "mixer"
    TIMED: ClassVar = {"layernorm": "norm"}
    STACK = "mamba_layer"
    PACKAGES: ClassVar = {"mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d"}
    LIMITS = (
        Limit(
            "Mamba's scan without its fused kernel (--disable-mamba-mem-eff-path)",
            "leave it out: Megatron does not train packed documents without it either",
            lambda args: not getattr(args, "use_mamba_mem_eff_path", True),
        ),
    )

    def layers(self, args: Any) -> tuple[bool, ...]:
        if not getattr(args, "hybrid_layer_pattern", None):
            return (False,) * args.num_layers
        return super().layers(args)

    def counts(self, args: Any) -> tuple[int, int]:
        heads = args.mamba_num_heads or 2 * args.hidden_size // args.mamba_head_dim
        return heads, args.mamba_num_groups

    def state_sizes(self, args: Any) -> tuple[int, int]:
        return args.mamba_state_dim, args.mamba_head_dim

    def sizes(self, args: Any) -> dict[str, Any]:
        (heads, groups), (keys, values) = self.counts(args), self.state_sizes(args)
        return {
            "mamba_heads": heads,
            "state_groups": groups,
            "state_keys": keys,
            "state_values": values,
        }

    def shares(self, groups: int, cp: int) -> bool:
        return not (groups % cp and cp % groups)

    def small(
        self, args: Any, hidden: int, tp: int, head_size: int, step: int = 1
    ) -> dict[str, Any]:
        if not self.asked(args):
            return {}
        heads, groups = self.small_heads(args, tp)
        return {
            "mamba_num_heads": heads,
            "mamba_num_groups": groups,
            "mamba_state_dim": SMALL_KEYS,
            "mamba_head_dim": SMALL_VALUES,
        }

    def local_layer(self, config: Any) -> Any:
        from megatron_epp.mcore.kinds.ssm.local import local_mamba

        return local_mamba(config)

    def holds(self, module: Any) -> bool:
        from megatron.core.ssm.mamba_mixer import MambaMixer

        return isinstance(module, MambaMixer)

    def install(self, place: LayerPlace) -> None:
        from megatron_epp.mcore.kinds.ssm.mamba import install_mamba

        install_mamba(place)

    def kept_shapes(self, layer: Any, context: int) -> tuple[tuple[int, ...], ...]:
        mixer, cp = layer.mixer, layer.mixer.cp
        state = (1, cp.nheads_local_tpcp, mixer.headdim, mixer.d_state)
        return state, (1, mixer.d_conv - 1, cp.conv1d_channels())


class GatedDeltaNetKind(SSMKind):
    """The gated delta net: of a HybridModel, or in the place of attention in some layers
    (--experimental-attention-variant gated_delta_net, --linear-attention-freq).

    Scaled down are heads and sizes of states. Kept: heads of V for one of Q and K, up to 4.
    """

    PRICED, NAME, LETTER, SLOT = GatedDeltaNetPart, "gated delta net", "G", "self_attention"
    TIMED: ClassVar = {"layernorm": "input_layernorm"}
    STACK = "gdn_layer"
    PACKAGES: ClassVar = {"fla": "flash-linear-attention"}
    LIMITS = (
        Limit(
            "gated delta nets over tensor-parallel ranks that all hold the same rows",
            "give --sequence-parallel: Megatron adds up their norm's gradients with it alone",
            lambda args: (
                GatedDeltaNetKind().asked(args)
                and args.tensor_model_parallel_size > 1
                and not args.sequence_parallel
            ),
        ),
    )

    def asked(self, args: Any) -> bool:
        variant = getattr(args, "experimental_attention_variant", None)
        return variant == DELTA or super().asked(args)

    def layers(self, args: Any) -> tuple[bool, ...]:
        if getattr(args, "hybrid_layer_pattern", None):
            return super().layers(args)
        if getattr(args, "experimental_attention_variant", None) != DELTA:
            return (False,) * args.num_layers
        every = args.linear_attention_freq
        if every is None:
            raise ValueError(
                f"--experimental-attention-variant {DELTA}: --linear-attention-freq is missing; "
                "expected N, so that each N-th layer has attention, or 1 or 0 for each layer"
            )
        if isinstance(every, int):
            return tuple(number % every != 0 for number in range(1, args.num_layers + 1))
        return mask_of_layers("--linear-attention-freq", every, args.num_layers)

    def counts(self, args: Any) -> tuple[int, int]:
        return args.linear_num_value_heads, args.linear_num_key_heads

    def state_sizes(self, args: Any) -> tuple[int, int]:
        return args.linear_key_head_dim, args.linear_value_head_dim

    def sizes(self, args: Any) -> dict[str, Any]:
        (heads, groups), (keys, values) = self.counts(args), self.state_sizes(args)
        return {
            "attention": False,
            "delta_heads": heads,
            "state_groups": groups,
            "state_keys": keys,
            "state_values": values,
        }

    def in_layers(self, args: Any, mask: Sequence[bool]) -> dict[str, Any]:
        if getattr(args, "experimental_attention_variant", None) != DELTA:
            return {}
        return {"linear_attention_freq": [int(there) for there in mask]}

    def small(
        self, args: Any, hidden: int, tp: int, head_size: int, step: int = 1
    ) -> dict[str, Any]:
        if not self.asked(args):
            return {}
        heads, groups = self.small_heads(args, tp)
        return {
            "linear_num_value_heads": heads,
            "linear_num_key_heads": groups,
            "linear_key_head_dim": SMALL_KEYS,
            "linear_value_head_dim": SMALL_VALUES,
        }

    def local_layer(self, config: Any) -> Any:
        from megatron_epp.mcore.kinds.ssm.local import local_gated_delta_net

        return local_gated_delta_net(config)

    def local_block(self, config: Any, vp_stage: int | None) -> Any:
        from megatron_epp.mcore.kinds.ssm.local import local_gated_delta_net_block

        if config.experimental_attention_variant != DELTA:
            return None
        return local_gated_delta_net_block(config, vp_stage)

    def holds(self, module: Any) -> bool:
        from megatron.core.ssm.gated_delta_net import GatedDeltaNet

        return isinstance(module, GatedDeltaNet)

    def install(self, place: LayerPlace) -> None:
        from megatron_epp.mcore.kinds.ssm.gated_delta_net import install_gated_delta_net

        install_gated_delta_net(place)

    def make_double(self, args: Any) -> None:
        if self.asked(args):
            from megatron_epp.mcore.kinds.ssm.gated_delta_net import make_rule_double

            make_rule_double()

    def kept_shapes(self, layer: Any, context: int) -> tuple[tuple[int, ...], ...]:
        net = layer.self_attention
        heads = net.num_v_heads_local_tp // net.cp_size
        convolved = net.conv_dim_local_tp // net.cp_size
        state = (1, heads, net.key_head_dim, net.value_head_dim)
        return state, (1, net.conv_kernel_dim - 1, convolved)


class KDAKind(LayerKind):
    """Kimi's delta attention, of frameworks' specifications: no flag of Megatron's asks for it."""

    NAME, SLOT = "Kimi's delta attention", "self_attention"

    def layers(self, args: Any) -> tuple[bool, ...]:
        return (False,) * args.num_layers

    def holds(self, module: Any) -> bool:
        from megatron_epp.mcore.kinds.ssm.fla_layer import KDA

        return all(hasattr(module, name) for name in KDA.convolutions)

    def install(self, place: LayerPlace) -> None:
        from megatron_epp.mcore.kinds.ssm.fla_layer import KDA, install_fla_layer

        install_fla_layer(place.layer.self_attention, place.index, KDA)

    def kept_shapes(self, layer: Any, context: int) -> tuple[tuple[int, ...], ...]:
        net = layer.self_attention
        q, k, v = (convolution.weight for convolution in (net.q_conv1d, net.k_conv1d, net.v_conv1d))
        heads, channels = net.A_log.numel(), len(q) + len(k) + len(v)
        state = (1, heads, net.dt_bias.numel() // heads, len(v) // heads)
        return state, (1, q.shape[-1] - 1, channels)
