"""MTPForward behind the decoder, each of which predicts a further token, on chunks.

    hidden 0 = the decoder's output
    hidden k = layers of depth k ( projection ( norm (hidden k-1), norm (embedding of token + k) ) )

Megatron takes token + k by rolling a row's tokens and adds the losses up itself
(core/transformer/multi_token_prediction.py). Here tokens and targets come from the corpus
(data/mtp_targets.py), and the output layer runs on each hidden state in turn. A depth's layers
are layers of the last stage: they have a letter of the plan, and K and V of their own in the store.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_epp.cost.catalogue.models import Model
from megatron_epp.mcore.data.chunk_params import ChunkParams


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """A depth of the stage: Megatron's ``module`` (MultiTokenPredictionLayer), and the first of its
    ``layers`` among the stage's. ``repeated``: layers behind the run that it was installed for."""

    module: Any
    first: int
    layers: tuple[Any, ...]
    repeated: int = 0


def mtp_layers_of(model: Any) -> tuple[MtpLayer, ...]:
    """The depths of Megatron's ``model``, a GPTModel or HybridModel; none where it has none on this
    stage."""
    block = getattr(model, "mtp", None)
    if block is None:
        return ()
    mtp_layers: list[MtpLayer] = []
    first = len(model.decoder.layers)
    for depth in range(model.config.mtp_num_layers):
        module = block.layers[0 if block.mtp_use_repeated_layer else depth]
        inner = module.mtp_model_layer
        layers = tuple(getattr(inner, "layers", (inner,)))  # a HybridModel's are a stack of some
        repeated = first - mtp_layers[0].first if block.mtp_use_repeated_layer and mtp_layers else 0
        mtp_layers.append(MtpLayer(module, first, layers, repeated))
        first += len(layers)
    return tuple(mtp_layers)


def layers_of(model: Any) -> tuple[Any, ...]:
    """The layers of a stage in the order of their letters: the decoder's, then those of depths. A
    repeated one is there once for each run."""
    return (
        *model.decoder.layers,
        *(layer for depth in mtp_layers_of(model) for layer in depth.layers),
    )


def kinds_of_stage(shape: Model, model: Any) -> tuple[str, ...]:
    """Kinds of the layers of ``model``, this stage's, as ``shape`` names them; none where it
    names none."""
    word = shape.layer_kinds
    if not word:
        return ()
    decoder = tuple(word[layer.layer_number - 1] for layer in model.decoder.layers)
    mtp_layers = len(layers_of(model)) - len(decoder)
    return (*decoder, *word[len(word) - mtp_layers :])


def embedded(model: Any, tokens_t: Tensor, positions_t: Tensor) -> Tensor:
    """Embeddings of the tokens that a depth reads."""
    embedding = model.embedding(input_ids=tokens_t[None], position_ids=positions_t[None])
    return embedding.detach() if model.config.mtp_detach_heads else embedding


def enter(
    depth: MtpLayer, model: Any, hidden_t1H: Tensor, tokens_t: Tensor, positions_t: Tensor
) -> Tensor:
    """Input of a depth's layers: the projection of hidden states and embeddings."""
    embedding = embedded(model, tokens_t, positions_t)
    return depth.module._concat_embeddings(hidden_t1H, embedding)


class MTPForward:
    """In place of the forward of ``model.mtp``: the hidden states of the decoder and of each depth,
    as a tuple; an evaluation's chunks have the decoder's alone. What is no chunk goes to Megatron.
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
    """Make the depths of ``model``, if it has any, those of chunks; its layers are elsewhere."""
    if mtp_layers_of(model):
        MTPForward(model)
