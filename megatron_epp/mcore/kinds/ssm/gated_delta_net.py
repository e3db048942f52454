"""Megatron's gated delta net on chunks: replacement of the computation between its projections.

The convolution and the gated delta rule are from flash-linear-attention (layers/ssm/fla_calls.py).
With --deterministic-mode, both are torch functions, as in Megatron, and accept one sequence per
call.

Shape suffixes: T rows of a chunk, C concatenated channels of Q, K, V, gate, beta and alpha, H heads
of V with P channels.
"""

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import gdn
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_epp.layers.attention.ulysses import Ulysses
from megatron_epp.layers.chunk_state import ChunkState
from megatron_epp.layers.recompute.outputs import DroppedOutputs, recomputable_all
from megatron_epp.layers.recompute.wrap import wrap_consumer, wrap_norm
from megatron_epp.layers.ssm.by_heads import Section, scan_by_heads
from megatron_epp.layers.ssm.carried import CarriedStates
from megatron_epp.layers.ssm.fla_calls import apply_rule, convolve_calls
from megatron_epp.mcore.data.chunk_params import ChunkParams
from megatron_epp.mcore.kinds.attention.module import SingleRank
from megatron_epp.mcore.kinds.base import LayerPlace
from megatron_epp.mcore.kinds.ssm.fla_kernels import suit_many_sizes


def install_gated_delta_net(place: LayerPlace) -> None:
    """Patch the gated delta net of a layer to scan chunks, and fla's kernels for many sizes."""
    suit_many_sizes()
    net, dropped = place.layer.self_attention, place.dropped
    net.forward = GatedDeltaNetScan(net, place.index, dropped)
    wrap_norm(place.layer.input_layernorm, dropped)
    for reader in (net.in_proj, net.out_proj):
        wrap_consumer(reader, dropped)


class GatedDeltaNetScan:
    """Replacement of the forward of Megatron's gated delta net ``net``.

    The scan carries states between the slices of a document. Inputs that are not chunks use
    Megatron's own forward.
    """

    def __init__(self, net: Any, layer: int, dropped: DroppedOutputs):
        self.net, self.layer, self.dropped = net, layer, dropped
        self.original: Callable[..., Any] = net.forward
        group = net.pg_collection.cp
        self.ulysses = Ulysses(group) if group.size() > 1 else None
        self.single_rank = _of_one_rank(net)

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *others: Any,
        packed_seq_params: Any = None,
        **named: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and bias of ``net``, as its forward does."""
        if not isinstance(packed_seq_params, ChunkParams):
            named["packed_seq_params"] = packed_seq_params
            return self.original(hidden_states, attention_mask, *others, **named)
        net = self.net
        rows_t1C, _ = net.in_proj(hidden_states)
        keys, values = net.num_k_heads_local_tp, net.num_v_heads_local_tp
        sections = (
            Section(keys, net.key_head_dim),  # Q
            Section(keys, net.key_head_dim),  # K
            Section(values, net.value_head_dim),  # V
            Section(values, net.value_head_dim),  # gate
            Section(values, 1),  # beta
            Section(values, 1),  # alpha
        )
        state = packed_seq_params.state
        y_tHP = scan_by_heads(rows_t1C[:, 0], sections, state, self.ulysses, self.scan)
        return net.out_proj(y_tHP.flatten(1)[:, None])

    def scan(self, rows_TC: Tensor, state: ChunkState, of_my_heads: bool) -> Tensor:
        """Return the outputs [T, H, P] of the rows; read and store states at slice boundaries.

        Args:
            rows_TC: [rows, channels] Rows after the input projection.
            state: State of the chunk.
            of_my_heads: Whether the rows contain only the heads of this context-parallel rank.
        """
        net = self.net if of_my_heads else self.single_rank
        group = net.pg_collection.cp
        qkv_1TC, gate, beta, alpha = rows_TC[None].split(net.feat_dim_split, -1)
        weight = gdn.get_parameter_local_cp(net.conv1d.weight, 0, group, _convolved(net))
        taps, channels, alone = weight.shape[-1], rows_TC.shape[1], net.config.deterministic_mode
        states = CarriedStates(state, state.layer(self.layer), taps, channels, alone)
        qkv_1TC = self._convolve(qkv_1TC[0], states, weight.squeeze(1), group)[None]
        gate = gate.reshape(1, len(rows_TC), -1, net.value_head_dim)
        q, k, v, gate, beta, alpha = net._prepare_input_for_gated_delta_rule(
            qkv_1TC, gate, 1, len(rows_TC), beta, alpha
        )
        A_log, dt_bias = (gdn.get_parameter_local_cp(x, 0, group) for x in (net.A_log, net.dt_bias))
        g, beta = net._compute_g_and_beta(A_log, dt_bias, alpha, beta)
        rule, inputs = net.gated_delta_rule, (q, k, v, g, beta)
        y_1THP = apply_rule(rule, inputs, states, use_qk_l2norm_in_kernel=False)
        return self._normed(net, y_1THP, gate)[0]

    def _convolve(
        self, rows_TC: Tensor, states: CarriedStates, weight_CW: Tensor, group: Any
    ) -> Tensor:
        net, bias = self.net, self.net.conv1d.bias
        if bias is not None:
            bias = gdn.get_parameter_local_cp(bias, 0, group, _convolved(net))

        def of_one(rows_1LC: Tensor, boundaries: None) -> Tensor:
            rows = len(rows_1LC[0])
            rows_1CL, taps = rows_1LC.transpose(1, 2), weight_CW[:, None]
            convolved = F.conv1d(rows_1CL, taps, bias, padding=taps.shape[-1] - 1, groups=len(taps))
            return net.act_fn(convolved[..., :rows]).transpose(1, 2)

        def convolution(rows_1LC: Tensor, boundaries: Tensor) -> Tensor:
            return gdn.causal_conv1d(
                x=rows_1LC,
                weight=weight_CW,
                bias=bias,
                activation=net.activation,
                initial_state=None,
                output_final_state=False,
                cu_seqlens=boundaries,
            )[0]

        return convolve_calls(rows_TC, states, of_one if states.alone else convolution)

    def _normed(self, net: Any, y_1THP: Tensor, gate_1THP: Tensor) -> Tensor:
        """Return the normed and gated outputs of the rule.

        If norms are recomputed and no all-to-all follows, the outputs are dropped and recomputed
        in the backward.
        """

        def norm(y: Tensor, gate: Tensor) -> tuple[Tensor]:
            return (net._apply_gated_norm(y, gate).reshape(y.shape),)

        if "layernorm" not in self.dropped.modules or self.ulysses is not None:
            return norm(y_1THP, gate_1THP)[0]
        (normed,), (handle,) = recomputable_all(norm, (y_1THP, gate_1THP))
        self.dropped.add(normed, handle)
        return normed


class _KeepsDouble(TorchFunctionMode):
    """Mode in which conversions of float64 to float32 do nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.to and args[1:] == (torch.float32,):
            args = (args[0], torch.promote_types(args[0].dtype, torch.float32))
        return func(*args, **(kwargs or {}))


def make_rule_double() -> None:
    """Patch Megatron's gated delta rule of --deterministic-mode to compute in float64.

    Megatron's own function casts its inputs to float32.
    """
    original = gdn.torch_chunk_gated_delta_rule
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def rule(*args: Any, **named: Any) -> Any:
        with _KeepsDouble():
            return original(*args, **named)

    gdn.torch_chunk_gated_delta_rule = rule


def _convolved(net: Any) -> list[int]:
    """Return the numbers of channels of Q, K and V on a TP rank, which the convolution reads."""
    return [net.qk_dim_local_tp, net.qk_dim_local_tp, net.v_dim_local_tp]


def _of_one_rank(net: Any) -> Any:
    """Return a copy of ``net`` for one CP rank with all heads; parameters are shared."""
    copied = copy.copy(net)
    copied.cp_size, copied.pg_collection = 1, copy.copy(net.pg_collection)
    copied.pg_collection.cp = SingleRank()
    copied._setup_variant_attrs()
    return copied
