"""Seconds per token of communication within a stage: gathers, all-to-all, experts."""

from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.network.topology import at_most
from megatron_epp.cost.profile import FLEX, LayerCoefficients


def tensor_seconds(layout: StageLayout, bytes_per_token: float) -> float:
    """Return the seconds per token to gather and scatter ``bytes_per_token`` in a TP group."""
    if layout.tp == 1:
        return 0.0
    moved = bytes_per_token * (layout.tp - 1) / layout.tp
    if layout.network is not None:
        return moved / (layout.cp * layout.network.ring(layout.tp))
    return moved / (layout.cp * at_most(layout.profile.tensor_bytes_per_second, layout.tp))


def gathered_bytes(layout: StageLayout, of: LayerCoefficients) -> float:
    """Return the bytes per token of other ranks' rows that a device holds from I to W.

    With tensor parallelism a sublayer's first product reads all rows of its TP group, and its last
    product all rows of the output's gradient (sequence parallelism gathers both).
    """
    return of.tensor_bytes_per_token * (layout.tp - 1) / (layout.tp * layout.cp)


def all_to_all_seconds(layout: StageLayout, of: LayerCoefficients) -> float:
    """Return the seconds per token of all-to-alls in a CP group, in a layer's forward.

    They exchange rows for heads in attention: Q, K, V and the output are sharded by rows (tokens)
    on one side, and by heads on the other (eq. 3 of InfiniPipe).

    Raises:
        ValueError: the profile has no all-to-all rates.
    """
    if layout.cp == 1 or not of.all_to_all_bytes_per_token:
        return 0.0
    moved = of.all_to_all_bytes_per_token / (layout.cp * layout.tp)
    if layout.network is not None:
        rate = layout.network.all_to_all(layout.cp, layout.tp)
        return moved / rate + layout.network.copy_seconds(moved)
    return moved / at_most(layout.profile.all_to_all_bytes_per_second, layout.cp)


def expert_seconds(layout: StageLayout, of: LayerCoefficients) -> float:
    """Return the seconds per token to send tokens to experts and back in a layer's forward."""
    if layout.ep == 1 or not of.expert_bytes_per_token:
        return 0.0
    moved = of.expert_bytes_per_token / (layout.cp * layout.tp)
    if layout.network is not None:
        copies = round(of.expert_copies) or 1
        once = layout.profile.token_dispatcher == FLEX
        return layout.network.dispatch_seconds(moved / copies, copies, layout.ep, once)
    moved *= (layout.ep - 1) / layout.ep
    return moved / at_most(layout.profile.all_to_all_bytes_per_second, layout.ep)


def gather_latency(layout: StageLayout, of: LayerCoefficients) -> float:
    """Return the latency in seconds of a layer's gathers and scatters in forward."""
    if layout.tp == 1 or layout.network is None:
        return 0.0
    return of.tensor_gathers * layout.network.gather_latency(layout.tp)


def uncovered_seconds(layout: StageLayout, of: LayerCoefficients) -> tuple[float, float]:
    """Return (seconds per token, latency in seconds) of collectives that B hides and I exposes.

    In each sublayer, B overlaps one gather or scatter in a TP group with the product of a weight
    gradient, which I does not compute.

    Raises:
        ValueError: the profile has no rates of gathers.
    """
    tensor = tensor_seconds(layout, of.tensor_bytes_per_token / 2)
    return tensor, gather_latency(layout, of) / 2


def exposed_seconds(layout: StageLayout, of: LayerCoefficients) -> float:
    """Return the seconds per token of all communication in a layer's forward, without latency."""
    tensor = tensor_seconds(layout, of.tensor_bytes_per_token)
    return all_to_all_seconds(layout, of) + tensor + expert_seconds(layout, of)
