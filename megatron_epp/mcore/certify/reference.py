"""The plain model: Megatron's own, in one process, on every document alone."""

import pickle
from typing import Any

import numpy
import torch
from megatron.core.utils import get_model_config

from megatron_epp.certify.batches import Frame, letters_drawn
from megatron_epp.certify.compare import whole
from megatron_epp.certify.protocol import ModelSetup, Reference, Role
from megatron_epp.certify.trainer_results import TrainerReference
from megatron_epp.layers.recompute.wrap import EXECUTABLE
from megatron_epp.mcore.capabilities.refusals import vocabulary_parallel
from megatron_epp.mcore.certify.adapters import adapt, gradient
from megatron_epp.mcore.certify.model_flags import describe, parsed, scaled
from megatron_epp.mcore.certify.models import begin, join, plain_model
from megatron_epp.mcore.certify.routing import RoutingNotes
from megatron_epp.mcore.certify.shards import fill, shards
from megatron_epp.mcore.flags import refusals_as_value_errors
from megatron_epp.mcore.model.kinds.registry import (
    MEGATRON_PARTS,
    letters_of_parts,
    lockstep_of,
)

# Added to every weight: norms of exactly one and biases of zero would hide what is left out.
JITTER = 0.1


class PlainModel:
    """Nothing of ours is in its path but the CPU host: local layers, Megatron's own attention with
    a causal mask, gradients straight from autograd.
    """

    def __init__(self, role: Role):
        self.trial, self.seed = role.trial, role.trial.seed
        join(role.folder / "meeting of one", 0, 1, role.patience)
        self.model: Any = None
        self.frame: Any = None  # a Frame, from prepare on

    def flags(self, turn: int) -> tuple[str, ...]:
        """The model flags whose turn it is."""
        return self.trial.models[turn % len(self.trial.models)]

    def prepare(self, turn: int) -> ModelSetup:
        """Read the flags and build the model. ValueError: flags that cannot be used."""
        degrees, lora_rank = self.trial.degrees, self.trial.lora_rank
        raw = parsed(self.flags(turn))
        if self.trial.device != "cpu":
            raw.transformer_impl = "local"  # kernels of GPUs know no float64
        small = scaled(raw, degrees, self.trial.overlap, lora_rank)
        args = small.plain
        begin(args, self.seed)
        with refusals_as_value_errors():
            self.model = plain_model(args, small.elastic.transformer_impl != "local")
        if lora_rank:
            adapt(self.model, lora_rank)
        self.routing = RoutingNotes(self.model)
        weights = whole(shards(self.model, lambda parameter: parameter.data))
        generator = numpy.random.default_rng(self.seed)
        scale = JITTER * args.init_method_std
        for key, tensor in sorted(weights.items()):
            weights[key] = tensor + scale * generator.standard_normal(tensor.shape)
        fill(self.model, weights)
        letters = letters_drawn(EXECUTABLE + letters_of_parts(args))
        self.frame = Frame(
            args.padded_vocab_size,
            small.layers,
            degrees.dp,
            letters,
            splits=all(part.splits(small.elastic) for part in MEGATRON_PARTS),
            lockstep=lockstep_of(small.elastic),
            vocabulary_parallel=vocabulary_parallel(small.elastic),
            ranks=degrees.cp,
        )
        return ModelSetup(
            pickle.dumps(small.elastic),
            self.frame,
            weights,
            describe(small.layers, small.elastic, lora_rank),
        )

    def compute(self, number: int) -> Reference:
        """Loss and gradients of batch ``number``."""
        drawn = self.frame.draw(self.seed, number)
        documents = zip(drawn.tokens, drawn.loss_masks, strict=True)
        losses = [
            (self.token_losses(tokens_1T[:, :-1], tokens_1T[:, 1:]) * torch.from_numpy(mask)).sum()
            for tokens_1T, mask in ((torch.from_numpy(one)[None], mask) for one, mask in documents)
        ]
        loss = torch.stack(losses).sum() / drawn.loss_tokens
        # Auxiliary losses are weighted by tokens, as the loss is, and divided with it.
        for part in MEGATRON_PARTS:
            part.weigh_losses(torch.tensor(1 / drawn.loss_tokens))
        return TrainerReference(
            self.gradients(loss),
            loss.item(),
            drawn.loss_tokens,
            self.trial.degrees.dp,
            self.routing.taken(),
        )

    def token_losses(self, tokens_1T: torch.Tensor, labels_1T: torch.Tensor) -> torch.Tensor:
        """[T] of one document alone."""
        length = tokens_1T.shape[1]
        mask_11TT = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        losses_1T = self.model(tokens_1T, torch.arange(length)[None], mask_11TT, labels=labels_1T)
        return losses_1T[0]

    def gradients(self, loss: torch.Tensor) -> dict[str, numpy.ndarray]:
        """Run the backward; the whole model's gradients by key, routers as Megatron's
        finalize_model_grads leaves them."""
        for parameter in self.model.parameters():
            parameter.grad = None
        loss.backward()
        self.routing.note_counts()
        config = get_model_config(self.model)
        for part in MEGATRON_PARTS:
            part.finish_plain(self.model, config)
        return whole(shards(self.model, lambda one: gradient(one, "grad")))
