"""Models that imitate frameworks' model classes other than GPTModel, to test ``attach``.

subclass    a subclass of GPTModel that does not call get_rotary_seq_len of its rotary
            embedding; the subclass selects rows of the rotary table by position id
encoder     a language model that adds the output of a pixel encoder to its token embeddings;
            every token has pixels, and the encoder runs once on each full document
"""

from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from megatron_epp.mcore.loops.adapters.samples import Samples
from tests.certify.loops.micro_batches import PIXELS


class TurnedByPositions(GPTModel):
    """GPTModel with a ``_preprocess`` that selects rotary rows by position, as in ms-swift."""

    def _preprocess(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor,
        decoder_input: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        **others: Any,
    ) -> tuple[Any, ...]:
        if decoder_input is None and self.pre_process:
            decoder_input = self.embedding(input_ids=input_ids, position_ids=position_ids)
        rotary = None
        if self.position_embedding_type == "rope":
            length = RotaryEmbedding.get_rotary_seq_len(
                self, inference_context, self.decoder, decoder_input, self.config,
                packed_seq_params,
            )  # fmt: skip
            packed = packed_seq_params is not None
            rotary = self.rotary_pos_emb(length, packed_seq=packed)
            if packed:
                rotary = rotary[position_ids[0]]
        return decoder_input, rotary, None, None, None, others.get("padding_mask")


class WithEncoder(MegatronModule):
    """Language model that adds encoded pixels [1, L, PIXELS] to the embeddings of its tokens."""

    def __init__(self, language_model: Any):
        super().__init__(language_model.config)
        self.language_model = language_model
        for name in ("pre_process", "post_process", "share_embeddings_and_output_weights"):
            setattr(self, name, getattr(language_model, name))
        if self.pre_process:
            config = self.config
            self.encoder = nn.Linear(PIXELS, config.hidden_size, dtype=config.params_dtype)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        packed_seq_params: Any = None,
        pixels: Tensor | None = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the language model's output; the first stage encodes ``pixels`` [1, L, PIXELS].

        All other arguments are passed to the language model.
        """
        hidden = None
        if self.pre_process:
            assert pixels is not None, "whole documents have pixels"
            seen_L1H = self.encoder(pixels.transpose(0, 1)).tanh()
            if self.config.sequence_parallel:
                seen_L1H = scatter_to_sequence_parallel_region(seen_L1H)
            hidden = self.language_model.embedding(input_ids, position_ids) + seen_L1H
        output: Tensor = self.language_model(
            input_ids,
            position_ids,
            attention_mask,
            decoder_input=hidden,
            labels=labels,
            packed_seq_params=packed_seq_params,
            padding_mask=padding_mask,
        )
        return output

    def set_input_tensor(self, tensor: Any) -> None:
        """Set the input of the language model."""
        self.language_model.set_input_tensor(tensor)

    def shared_embedding_or_output_weight(self) -> Tensor:
        """Return the language model's shared weight."""
        weight: Tensor = self.language_model.shared_embedding_or_output_weight()
        return weight


class PixelSamples(Samples):
    """Adapter between the loop's samples, in which every token has pixels, and ``attach``."""

    def inputs(self, micro_batch: Mapping[str, Any], document: int) -> Mapping[str, Any]:
        """Return the arguments of the model's forward for one full document."""
        names = {"tokens": "input_ids", "position_ids": "position_ids", "pixels": "pixels"}
        row = slice(document, document + 1)
        return {argument: micro_batch[name][row] for name, argument in names.items()}


def _as_subclass(model: Any) -> Any:
    model.__class__ = TurnedByPositions
    return model


AROUND: Mapping[str, Callable[[Any], Any]] = {"subclass": _as_subclass, "encoder": WithEncoder}
