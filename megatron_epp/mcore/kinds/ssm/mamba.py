"""Replacement of the scan of Megatron's Mamba-2 mixer, for chunks.

The scan kernel includes the convolution. It accepts an initial state, but not the rows before a
slice, which the convolution needs. Therefore these rows are added to the call with a time step of
zero: they change no state, and their outputs are dropped.

Shape suffixes: T rows of a call, C concatenated channels of z, x, B, C and dt, H heads of P
channels.
"""

import copy
from typing import Any

import torch
from megatron.core.ssm import mamba_mixer
from torch import Tensor

from megatron_epp.layers.attention.ulysses import Ulysses
from megatron_epp.layers.chunk_state import ChunkState
from megatron_epp.layers.concatenated import concatenated
from megatron_epp.layers.recompute.wrap import wrap_consumer, wrap_norm
from megatron_epp.layers.ssm.by_heads import Section, scan_by_heads
from megatron_epp.layers.ssm.carried import CarriedStates, most_rows
from megatron_epp.mcore.data.chunk_params import ChunkParams
from megatron_epp.mcore.kinds.base import LayerPlace

# With this input, softplus returns a time step of 0 in any dtype.
NO_TIME = -1e4


def install_mamba(place: LayerPlace) -> None:
    """Patch the Mamba mixer of a layer to scan chunks, and wrap its modules for recompute."""
    layer, dropped = place.layer, place.dropped
    mixer = layer.mixer
    MambaScan(mixer, place.index)
    for norm in (layer.norm, *([mixer.norm] if mixer.rmsnorm else [])):
        wrap_norm(norm, dropped)
    for reader in (mixer.in_proj, mixer.out_proj):
        wrap_consumer(reader, dropped)


class MambaScan:
    """Replacement of ``_ssm_training`` and ``cp.pre_conv_ssm`` of Megatron's ``mixer``.

    The scan carries states between the slices of a document. Inputs that are not chunks use
    Megatron's own functions.
    """

    def __init__(self, mixer: Any, layer: int):
        self.mixer, self.layer = mixer, layer
        self.original, self.exchange = mixer._ssm_training, mixer.cp.pre_conv_ssm
        self.local, self.single_rank = mixer.cp, _of_one_rank(mixer.cp)
        group = mixer.pg_collection.cp
        self.ulysses = Ulysses(group) if group.size() > 1 else None
        mixer.cp.pre_conv_ssm = self._before
        mixer._ssm_training = self._train

    def _before(self, rows_t1C: Tensor, packed_seq_params: Any = None) -> Tensor:
        """Return a chunk's rows unchanged: Megatron's all-to-all assumes zigzag order."""
        if isinstance(packed_seq_params, ChunkParams):
            return rows_t1C
        return self.exchange(rows_t1C, packed_seq_params)

    def _train(self, rows_t1C: Tensor, packed_seq_params: Any = None) -> Tensor:
        if not isinstance(packed_seq_params, ChunkParams):
            return self.original(rows_t1C, packed_seq_params)
        mixer, cp = self.mixer, self.single_rank
        sections = (
            Section(cp.nheads_local_tp, mixer.headdim),  # z
            Section(cp.nheads_local_tp, mixer.headdim),  # x
            Section(cp.ngroups_local_tp, mixer.d_state),  # B
            Section(cp.ngroups_local_tp, mixer.d_state),  # C
            Section(cp.nheads_local_tp, 1),  # dt
        )
        state = packed_seq_params.state
        y_tHP = scan_by_heads(rows_t1C[:, 0], sections, state, self.ulysses, self.scan)
        y_t1I = y_tHP.flatten(1)[:, None]
        if not mixer.rmsnorm:
            return y_t1I
        # Like the scan, mamba_ssm's norm counts elements in 32 bits.
        return concatenated([mixer.norm(y) for y in y_t1I.split(most_rows(y_t1I.shape[-1]))])

    def scan(self, rows_TC: Tensor, state: ChunkState, of_my_heads: bool) -> Tensor:
        """Return the outputs [T, H, P] of the rows; read and store states at slice boundaries.

        Args:
            rows_TC: [rows, channels] Rows after the input projection.
            state: State of the chunk.
            of_my_heads: Whether the rows contain only the heads of this context-parallel rank.
        """
        mixer, cp = self.mixer, self.local if of_my_heads else self.single_rank
        weight_CW = cp.get_conv1d_weight().squeeze(1)
        convolved, taps = weight_CW.shape
        inner = cp.d_inner_local_tpcp
        states = CarriedStates(state, state.layer(self.layer), taps, rows_TC.shape[1])
        D = cp.get_D().float()
        parameters = {
            "conv1d_weight": weight_CW,
            "conv1d_bias": cp.get_conv1d_bias(),
            "dt_bias": cp.get_dt_bias().float(),
            "A": -torch.exp(cp.get_A_log().float()),
            "D": D.unflatten(0, (-1, mixer.headdim)) if mixer.D_has_hdim else D,
            "chunk_size": mixer.chunk_size,
            "activation": mixer.activation,
            "headdim": None if mixer.D_has_hdim else mixer.headdim,
            "ngroups": cp.ngroups_local_tpcp,
            "norm_before_gate": mixer.norm_before_gate,
        }
        outputs = []
        for number, rows in enumerate(states.of_calls(rows_TC)):
            front = states.front(number, rows)
            count = 0 if front is None else len(front)
            if front is not None:
                rows = torch.cat((_standing(front, rows, inner), rows))
            seen = rows[:, inner : inner + convolved]
            states.after(number, seen)
            initial, wants = states.initial(number), states.wants_final(number)
            dtype = mixer.mamba_training_ssm_states_dtype
            if initial is not None or wants:
                # The gradient of a state sums the gradients of many slices.
                dtype = torch.promote_types(dtype, torch.float32)
            result = mamba_mixer.mamba_split_conv1d_scan_combined(
                rows[None],
                **parameters,
                initial_states=None if initial is None else initial[None],
                seq_idx=states.sequences(number, count, rows.device),
                return_final_states=wants,
                **({"state_dtype": dtype} if mamba_mixer.MAMBA_HAS_STATE_DTYPE else {}),
            )
            y_1LI, final = result if wants else (result, None)
            y = y_1LI[0, count:].unflatten(1, (-1, mixer.headdim))
            outputs.append(states.leave(number, y, None if final is None else final[0]))
        return concatenated(outputs)


def _standing(front: Tensor, rows_TC: Tensor, inner: int) -> Tensor:
    """Return rows [W-1, C] to add before a slice, if the convolution has W taps.

    ``front`` is the rows' input of the convolution, and their time steps are zero.
    """
    gate = front.new_zeros(len(front), inner)
    heads = rows_TC.shape[1] - inner - front.shape[1]
    return torch.cat((gate, front, front.new_full((len(front), heads), NO_TIME)), 1)


def _of_one_rank(cp: Any) -> Any:
    """Return a copy of ``cp`` for one rank with all heads.

    ``cp`` is Megatron's object that shards a mixer's parameters over context-parallel ranks.
    """
    copied = copy.copy(cp)
    copied.cp_size = 1
    for name in ("d_inner_local", "nheads_local", "ngroups_local"):
        setattr(copied, f"{name}_tpcp", getattr(cp, f"{name}_tp"))
    return copied
