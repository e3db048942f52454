"""MTP modules on chunks: each of them runs after the decoder and predicts one more token.

    hidden 0 = the decoder's output
    hidden k = layers of MTP module k ( projection ( norm (hidden k-1), norm (embedding of token +
      k) ) )

Megatron rolls a row's tokens to find the token k positions later, and its MTP block sums the losses
(core/transformer/multi_token_prediction.py). Here, tokens and targets are read from the corpus
(data/mtp_targets.py), and the LM head runs once for each hidden state. Layers of MTP modules are
layers of the last stage: each layer has a recompute mode in the plan, and its own K and V in the
store.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_epp.cost.catalogue.models import Model
from megatron_epp.mcore.data.chunk_params import ChunkParams


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """An MTP module of the stage, or one run of a shared MTP module.

    Attributes:
        module: Megatron's MultiTokenPredictionLayer.
        first: Index in the stage of the module's first layer.
        layers: Layers of the module.
        repeated: For a repeated run of a shared module: index of this run's first layer minus index
            of the first run's first layer. Otherwise 0.
    """

    module: Any
    first: int
    layers: tuple[Any, ...]
    repeated: int = 0


def mtp_layers_of(model: Any) -> tuple[MtpLayer, ...]:
    """Return the MTP modules of this stage's ``model``; empty without MTP."""
    block = getattr(model, "mtp", None)
    if block is None:
        return ()
    mtp_layers: list[MtpLayer] = []
    first = len(model.decoder.layers)
    for depth in range(model.config.mtp_num_layers):
        module = block.layers[0 if block.mtp_use_repeated_layer else depth]
        inner = module.mtp_model_layer
        layers = tuple(getattr(inner, "layers", (inner,)))  # a HybridModel has a stack
        repeated = first - mtp_layers[0].first if block.mtp_use_repeated_layer and mtp_layers else 0
        mtp_layers.append(MtpLayer(module, first, layers, repeated))
        first += len(layers)
    return tuple(mtp_layers)


def layers_of(model: Any) -> tuple[Any, ...]:
    """Return the layers of a stage in the order of recompute modes: decoder layers first, then MTP.

    Layers of a shared MTP module are repeated for each run.
    """
    return (
        *model.decoder.layers,
        *(layer for depth in mtp_layers_of(model) for layer in depth.layers),
    )


def kinds_of_stage(shape: Model, model: Any) -> tuple[str, ...]:
    """Return each layer's kind in the cost model; () if ``shape`` has no ``layer_kinds``."""
    word = shape.layer_kinds
    if not word:
        return ()
    decoder = tuple(word[layer.layer_number - 1] for layer in model.decoder.layers)
    mtp_layers = len(layers_of(model)) - len(decoder)
    return (*decoder, *word[len(word) - mtp_layers :])


def embedded(model: Any, tokens_t: Tensor, positions_t: Tensor) -> Tensor:
    """Return the embeddings of an MTP module's tokens, detached with --mtp-detach-heads."""
    embedding = model.embedding(input_ids=tokens_t[None], position_ids=positions_t[None])
    return embedding.detach() if model.config.mtp_detach_heads else embedding


def enter(
    depth: MtpLayer, model: Any, hidden_t1H: Tensor, tokens_t: Tensor, positions_t: Tensor
) -> Tensor:
    """Return the input of an MTP module's layers: the projection of hidden states and embeddings.

    Args:
        depth: The MTP module.
        model: The model of the last stage.
        hidden_t1H: [local rows, 1, hidden size] Hidden states of the decoder, or of the MTP module
            before this module.
        tokens_t: [local rows] Tokens whose embeddings the module reads.
        positions_t: [local rows] Positions of the rows.
    """
    embedding = embedded(model, tokens_t, positions_t)
    return depth.module._concat_embeddings(hidden_t1H, embedding)


class MTPForward:
    """Replacement of the forward of ``model.mtp`` for chunks.

    In training, the forward returns a tuple of the hidden states of the decoder and of each MTP
    module. In evaluation, the tuple contains only the hidden states of the decoder. For inputs that
    are not chunks, Megatron's own forward runs. The constructor replaces the forward.
    """

    def __init__(self, model: Any):
        self.model, self.depths = model, mtp_layers_of(model)
        self.original: Callable[..., Tensor] = model.mtp.forward
        model.mtp.forward = self

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        packed_seq_params: Any = None,
        rotary_pos_emb: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Return the hidden states, or Megatron's result for inputs that are not chunks."""
        if not isinstance(packed_seq_params, ChunkParams):
            return self.original(
                hidden_states=hidden_states,
                packed_seq_params=packed_seq_params,
                rotary_pos_emb=rotary_pos_emb,
                **others,
            )
        if packed_seq_params.mtp_tokens is None:
            return (hidden_states,)
        return tuple(self._run(hidden_states, packed_seq_params, rotary_pos_emb))

    def _run(
        self, hidden_t1H: Tensor, params: ChunkParams, rotary: Tensor | None
    ) -> Iterator[Tensor]:
        yield hidden_t1H
        if self.model.config.mtp_detach_heads:
            hidden_t1H = hidden_t1H.detach()
        assert params.mtp_tokens is not None, "the corpus's tokens come with the chunk"
        for depth, tokens_t in zip(self.depths, params.mtp_tokens, strict=True):
            hidden_t1H = depth.module._proj_and_transformer_layer(
                hidden_states=hidden_t1H,
                decoder_input=embedded(self.model, tokens_t, params.positions),
                rotary_pos_emb=rotary,
                packed_seq_params=params.repeated(depth.repeated) if depth.repeated else params,
            )
            yield hidden_t1H


def install_mtp(model: Any) -> None:
    """Replace the forward of ``model.mtp`` with :class:`MTPForward`, if the model has MTP.

    The layers of the MTP modules are patched separately.
    """
    if mtp_layers_of(model):
        MTPForward(model)
