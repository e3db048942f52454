"""Patches of Megatron's routers, whose losses on chunks are computed from router statistics.

Three methods of ``TopKRouter`` (core/transformer/moe/router.py) are replaced on the instance:

    apply_z_loss                Megatron calls it first, with the logits; here it adds all router
                                losses; auxiliary losses are computed per document, or per
                                micro-batch of an external training loop (aux_loss), instead of per
                                chunk (layers/moe/router_stats.py)
    is_aux_loss_enabled         returns False on chunks
    _apply_expert_bias          counts the tokens of each expert once per chunk, without padding
                                (Megatron's method counts padding, and fails with a mask)

Weights, checkpoints and the choice of experts do not change. Outside of training iterations, for
example in calibration and evaluation, a router adds no loss and counts no tokens. In an external
training loop, inputs that are not chunks, such as whole micro-batches, use Megatron's own methods
(``outside``).
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_epp.ir import Plan, Span
from megatron_epp.layers.moe.current_chunk import CurrentChunk, note_in_layer, taken_along
from megatron_epp.layers.moe.router_stats import Balancing, Pools, RouterStats
from megatron_epp.layers.recompute.outputs import DroppedOutputs
from megatron_epp.layers.recompute.wrap import wrap_consumer, wrap_mlp, wrap_norm
from megatron_epp.mcore.data.chunk_params import state_of
from megatron_epp.mcore.kinds.moe.activation import wrap_activations
from megatron_epp.mcore.kinds.moe.biases import fix_expert_biases
from megatron_epp.mcore.kinds.moe.exchange import drop_exchanged, install_exchange
from megatron_epp.mcore.kinds.moe.halves import install_halves, set_halved_from
from megatron_epp.mcore.kinds.mtp.mtp_layers import layers_of

# Megatron's auxiliary losses that can be computed per document, and their names in its log.
AUXILIARY = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
LOGGED = (*AUXILIARY.values(), "z_loss")


def moe_layers(model: Any) -> Iterator[tuple[int, MoELayer]]:
    """Yield (index in the stage, MoELayer) for every MoE layer of this rank's model.

    An MTP layer that is run several times is yielded once for each run.
    """
    model = unwrap_model(model)
    decoder = getattr(model, "decoder", None)
    for index, layer in enumerate(() if decoder is None else layers_of(model)):
        if isinstance(experts := getattr(layer, "mlp", None), MoELayer):
            yield index, experts


class ChunkRouter:
    """Methods with which Megatron's ``router`` computes losses and token counts of chunks.

    The constructor replaces ``apply_z_loss``, ``is_aux_loss_enabled`` and ``_apply_expert_bias`` of
    the router.

    Args:
        router: Megatron's router.
        index: Index of the layer in the stage.
        current_chunk: Holder of the state of the chunk that is being computed.
        outside: Whether inputs that are not chunks use Megatron's own methods.
    """

    def __init__(self, router: Any, index: int, current_chunk: CurrentChunk, outside: bool = False):
        self.router, self.index, self.current_chunk = router, index, current_chunk
        self._first = False  # whether this is the chunk's first run (not a recompute); see losses
        self.outside = outside  # whether inputs that are not chunks use Megatron's methods
        self._z_loss, router.apply_z_loss = router.apply_z_loss, self.losses
        original = router.is_aux_loss_enabled
        router.is_aux_loss_enabled = lambda: self._is_outside and original()
        self._count, router._apply_expert_bias = router._apply_expert_bias, self.count

    @property
    def _is_outside(self) -> bool:
        return self.outside and self.current_chunk.state is None

    def losses(self, logits_tE: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return ``logits_tE`` [t, E], whose backward adds the gradients of all router losses.

        This method replaces ``apply_z_loss``. The first run of a chunk also updates the router
        statistics. ``padding_mask`` must be None for chunks.
        """
        if self._is_outside:
            return self._z_loss(logits_tE, **_if_masked(padding_mask))
        assert padding_mask is None, "the router stats know padding"
        router_stats, state = self._router_stats()
        if router_stats is None:
            return logits_tE
        layer = state.layer(self.index)
        self._first = router_stats.first_time(layer, state.chunk)
        logits_tE = router_stats.restrained(logits_tE, layer, state, self._first)
        fraction = fraction_of_run(self.router)
        return router_stats.balanced(logits_tE, self._scored, layer, state, self._first, fraction)

    def count(self, routing_map_tE: Tensor, padding_mask: Tensor | None = None) -> None:
        """Add the tokens of each expert in a routing map [t, E] to ``local_tokens_per_expert``.

        This method replaces ``_apply_expert_bias``. It does not count padding or recomputed chunks.
        It counts a token of a prefix once for every sample that shares it.
        """
        router = self.router
        if self._is_outside:
            self._count(routing_map_tE, **_if_masked(padding_mask))
            return
        router_stats, state = self._router_stats()
        if router_stats is None or not router.enable_expert_bias or not self._first:
            return
        times_t = router_stats.times(state, routing_map_tE)
        router.local_tokens_per_expert += (routing_map_tE * times_t[:, None]).sum(dim=0)

    def _scored(self, logits_tE: Tensor) -> tuple[Tensor, Tensor]:
        router = self.router
        return compute_routing_scores_for_aux_loss(
            logits_tE, router.topk, router.score_function, fused=router.config.moe_router_fusion
        )

    def _router_stats(self) -> tuple[RouterStats | None, Any]:
        state = self.current_chunk.state
        if state is None or not state.training:
            return None, state
        return state.router_stats, state


def _if_masked(padding_mask: Tensor | None) -> dict[str, Tensor]:
    """Return the keyword argument ``padding_mask``, but {} if it is None (Megatron before 0.19)."""
    return {} if padding_mask is None else {"padding_mask": padding_mask}


def install_in_moe(layer: Any, index: int, dropped: DroppedOutputs, in_loop: bool = False) -> None:
    """Patch the MoE of Megatron's ``layer`` to compute chunks.

    The patches change the router, the token dispatch, expert biases, and the modules that selective
    recompute supports. Three modules read the output of the norm before the MoE, in this order: the
    shared experts, the router, and the projection to latents.

    Args:
        layer: Megatron's layer with an MoE.
        index: Index of the layer in the stage.
        dropped: Outputs that the layer drops in the forward and recomputes in the backward.
        in_loop: Whether inputs that are not chunks use Megatron's own methods.
    """
    experts, current_chunk = layer.mlp, CurrentChunk()
    wrap_norm(layer.pre_mlp_layernorm, dropped)
    if experts.shared_experts is not None:
        wrap_consumer(experts.shared_experts, dropped, last=False)
    projection = getattr(experts, "fc1_latent_proj", None)
    wrap_consumer(experts.router, dropped, last=projection is None)
    if projection is not None:
        wrap_consumer(projection, dropped)
    fix_expert_biases(experts)
    wrap_activations(experts, dropped)
    install_exchange(experts, current_chunk)
    install_halves(experts, current_chunk, dropped)
    ChunkRouter(experts.router, index, current_chunk, in_loop)
    layer.forward = note_in_layer(layer.forward, current_chunk, state_of)
    with taken_along(experts, current_chunk):
        wrap_mlp(experts, dropped)


def halve_experts(models: Sequence[Any], tokens: float) -> None:
    """Run chunks of at least ``tokens`` in halves; ranks that share experts pass equal numbers."""
    for model in models:
        for _, layer in moe_layers(model):
            set_halved_from(layer, tokens)


# ------------------------------------------------------------------ an iteration


def router_stats_for(
    model: Any,
    plan: Plan,
    scale: Callable[[torch.device], Tensor | float],
    ends: Sequence[int],
    micro_batches: Sequence[int] = (),
) -> RouterStats | None:
    """Return new router statistics for an iteration on this rank's stage.

    This function also converts the routers' token counts to float32.

    Args:
        model: The stage module.
        plan: The plan of the iteration.
        scale: Function (device) -> the loss scale on the device.
        ends: For each sample, the document of the plan in which it ends. The sample consists of
            this document and of the prefixes that it continues.
        micro_batches: Number of consecutive samples of each micro-batch of an external training
            loop. If empty, every sample is balanced independently.

    Returns:
        The statistics; None if the stage has no MoE layer, or if its routers are not patched.
    """
    model = unwrap_model(model)
    routers = [layer.router for _, layer in moe_layers(model)]
    if not any("apply_z_loss" in vars(router) for router in routers):
        return None
    for router in routers:
        _count_in_full(router)
    layers, device = len(layers_of(model)), routers[0].weight.device
    rules = balancing_of(model.config)
    paths = [(*plan.prefix_of(end), Span(end, 0, plan.documents[end])) for end in ends]
    pools = Pools.each_alone(paths)
    if micro_batches:
        pools = pools_of(paths, micro_batches, model.config, rules)
    spans = (span for chunk in plan.chunks for span in chunk.spans)
    return RouterStats(rules, spans, layers, pools, scale(device))


def pools_of(
    paths: Sequence[Sequence[Span]], micro_batches: Sequence[int], config: Any, rules: Balancing
) -> Pools:
    """Return the pools: sets of samples over which the load of experts is balanced together.

    With these pools, the losses equal Megatron's losses of whole micro-batches without padding.
    ``paths`` are the spans of every sample. ``micro_batches`` are the numbers of consecutive
    samples of the micro-batches. ``config`` is Megatron's configuration, and ``rules`` are the
    settings of the load balancing.

        aux_loss       one pool per micro-batch
        seq_aux_loss   one pool per sample; as in Megatron, all samples of a micro-batch have
                       equal weight, even if their lengths differ
    """
    alone = AUXILIARY["seq_aux_loss"] in dict(rules.auxiliary)
    lengths = iter([sum(span.tokens for span in path) for path in paths])
    of: list[int] = []
    fractions: list[float] = []
    token_fractions: list[float] = []
    for number, count in enumerate(micro_batches):
        of_batch = [*islice(lengths, count)]
        tokens = sum(of_batch)
        # Megatron divides losses by the number of micro-batches and by the ranks that reduce them.
        scale, each = 1.0, 1.0
        if not config.calculate_per_token_loss:
            scale = config.context_parallel_size / len(micro_batches)
            each = scale / tokens
        if alone:
            of += range(len(fractions), len(fractions) + count)
            weight = (
                count / tokens if config.calculate_per_token_loss else scale * count / tokens**2
            )
            fractions += [length * weight for length in of_batch]
            token_fractions += [each] * count
        else:
            of += [number] * count
            fractions.append(each)
            token_fractions.append(each)
    return Pools(paths, of, fractions, token_fractions)


def _count_in_full(router: Any) -> None:
    """Convert the router's token counts to float32.

    In bf16, adding 1 to a count of 256 or more may not change it, so counts would depend on how
    documents are cut.
    """
    counts = router.local_tokens_per_expert
    if counts is not None and counts.dtype != torch.float32:
        counts.data = counts.data.float()


def balancing_of(config: Any) -> Balancing:
    """Return this rank's settings of load balancing according to Megatron's ``config``."""
    kinds = config.moe_router_load_balancing_type
    kinds = [kinds] if isinstance(kinds, str) else kinds
    coefficients = config.moe_aux_loss_coeff
    if not isinstance(coefficients, list):
        coefficients = [coefficients] * len(kinds)
    auxiliary = tuple(
        (AUXILIARY[kind], coefficient)
        for kind, coefficient in zip(kinds, coefficients, strict=True)
        if kind in AUXILIARY and coefficient
    )
    # Rows are sharded over context-parallel ranks, and with sequence parallelism over
    # tensor-parallel ranks within each shard (mcore/data/row_shard.py).
    splits = config.tensor_model_parallel_size if config.sequence_parallel else 1
    place = mpu.get_context_parallel_rank() * splits
    place += mpu.get_tensor_model_parallel_rank() if splits > 1 else 0
    group = mpu.get_tensor_and_context_parallel_group()
    return Balancing(
        experts=config.num_moe_experts,
        topk=config.moe_router_topk,
        auxiliary=auxiliary,
        z_coefficient=config.moe_z_loss_coeff or 0.0,
        place=place,
        places=config.context_parallel_size * splits,
        splits=splits,
        group=group if group.size() > 1 else None,
    )


def report(router_stats: RouterStats, model: Any) -> None:
    """Add the iteration's router losses to Megatron's MoE metrics tracker."""
    config = unwrap_model(model).config
    replicas = mpu.get_data_parallel_world_size()
    for name, losses_L in router_stats.losses().items():
        values = _logged(name, config)
        for index, layer in moe_layers(model):
            # With several layers per MTP module, Megatron's number may be one too large.
            place = min(logged_number(layer), len(values)) - 1
            values[place] += losses_L[index] * fraction_of_run(layer.router) / replicas


def logged_number(layer: MoELayer) -> int:
    """Return the layer number, from 1, under which Megatron logs an MoE layer.

    Layers of MTP modules are numbered after the decoder layers.
    """
    is_mtp = getattr(layer.router, "is_mtp_layer", False)
    return int(layer.layer_number + (layer.router.config.num_layers if is_mtp else 0))


def fraction_of_run(router: Any) -> float:
    """Return the weight of one run of a router in its auxiliary losses and in its logged z-loss.

    The weight is 1, except for an MTP layer that is run several times. The weights of its runs sum
    to 1.
    """
    config = router.config
    if getattr(router, "is_mtp_layer", False) and config.mtp_use_repeated_layer:
        return 1.0 / config.mtp_num_layers
    return 1.0


def prepare_log(config: Any) -> None:
    """Create the entries for MoE losses in Megatron's metrics tracker; every stage must do so.

    Each tensor-, context- and data-parallel rank adds its part of a loss, and the entry sums over
    these ranks. Megatron's own entries use averages, which gloo does not support and which weight
    every chunk equally.
    """
    for name in LOGGED:
        _logged(name, config)


def _logged(name: str, config: Any) -> Tensor:
    """Return the values by layer of loss ``name`` in Megatron's log; create them if missing."""
    layers = config.num_layers + (getattr(config, "mtp_num_layers", None) or 0)
    group = mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
    tracker = _tracker()
    if isinstance(tracker, dict):
        entry = tracker.setdefault(name, {})
        if "values" not in entry:
            entry["values"] = torch.zeros(layers, device=torch.cuda.current_device())
        entry |= {"reduce_group": group, "avg_group": None, "reduce_group_has_dp": True}
        values: Tensor = entry["values"]
        return values
    tracker.ensure_initialized(name, layers)
    metric = tracker.metrics[name]
    metric.reduce_group, metric.avg_group, metric.needs_dp_avg = group, None, False
    values = metric.values
    return values


def _tracker() -> Any:
    """Return Megatron's log of router losses: an object, or before 0.18 a dict of dicts."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ModuleNotFoundError:
        from megatron.core.transformer.moe import moe_utils

        return moe_utils.get_moe_layer_wise_logging_tracker()
    return get_moe_metrics_tracker()


# ------------------------------------------------------------------ what an attempt leaves


def routing_tensors(model: Any) -> list[Tensor]:
    """Return the tensors of the routers that an iteration changes.

    These are the expert biases, the token counts that change the biases, and the logged losses.
    """
    tracker = _tracker()
    if isinstance(tracker, dict):
        tensors = [entry["values"] for entry in tracker.values()]
    else:
        tensors = [entry.values for entry in tracker.metrics.values()]
    for _, layer in moe_layers(model):
        if layer.router.enable_expert_bias:
            tensors += [layer.router.expert_bias, layer.router.local_tokens_per_expert]
    return tensors


def drop_routing(model: Any) -> None:
    """Free what Megatron's token dispatchers reference of a chunk whose forward has failed."""
    for _, layer in moe_layers(model):
        drop_exchanged(layer)
