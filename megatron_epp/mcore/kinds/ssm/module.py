"""SSM and linear-attention layers on chunks."""

from typing import Any, override

from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_mixer import MambaMixer

from megatron_epp.mcore.kinds.base import KeptShapes, KindModule, LayerPlace
from megatron_epp.mcore.kinds.ssm.gated_delta_net import install_gated_delta_net
from megatron_epp.mcore.kinds.ssm.kind import GatedDeltaNetKind, MambaKind
from megatron_epp.mcore.kinds.ssm.local import (
    local_gated_delta_net,
    local_gated_delta_net_block,
    local_mamba,
)
from megatron_epp.mcore.kinds.ssm.mamba import install_mamba


class MambaModule(KindModule):
    """Mamba-2 layers in Megatron's modules."""

    KIND = MambaKind()

    @override
    def holds(self, module: Any) -> bool:
        return isinstance(module, MambaMixer)

    @override
    def install(self, place: LayerPlace) -> None:
        install_mamba(place)

    @override
    def kept_shapes(self, layer: Any, context: int) -> KeptShapes:
        mixer, cp = layer.mixer, layer.mixer.cp
        state = (1, cp.nheads_local_tpcp, mixer.headdim, mixer.d_state)
        return KeptShapes((state, (1, mixer.d_conv - 1, cp.conv1d_channels())))

    @override
    def local_layer(self, config: Any) -> Any:
        return local_mamba(config)


class GatedDeltaNetModule(KindModule):
    """Gated delta net layers in Megatron's modules."""

    KIND = GatedDeltaNetKind()

    @override
    def holds(self, module: Any) -> bool:
        return isinstance(module, GatedDeltaNet)

    @override
    def install(self, place: LayerPlace) -> None:
        install_gated_delta_net(place)

    @override
    def kept_shapes(self, layer: Any, context: int) -> KeptShapes:
        net = layer.self_attention
        heads = net.num_v_heads_local_tp // net.cp_size
        convolved = net.conv_dim_local_tp // net.cp_size
        state = (1, heads, net.key_head_dim, net.value_head_dim)
        return KeptShapes((state, (1, net.conv_kernel_dim - 1, convolved)))

    @override
    def local_layer(self, config: Any) -> Any:
        return local_gated_delta_net(config)

    @override
    def local_block(self, config: Any, vp_stage: int | None) -> Any:
        if config.experimental_attention_variant not in self.KIND.VARIANTS:
            return None
        return local_gated_delta_net_block(config, vp_stage)
