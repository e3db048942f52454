"""The plain model: Megatron's own, in one process, on every document alone."""

import pickle
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from megatron.core.distributed.finalize_model_grads import (
    _update_router_expert_bias,
    reset_model_temporary_tensors,
)
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.utils import get_model_config

from megatron_epp.certify.batches import Frame, draw, letters_drawn
from megatron_epp.certify.compare import whole
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.protocol import Prepared, Reference, Role
from megatron_epp.layers.recompute.wrap import EXECUTABLE
from megatron_epp.mcore.capabilities.refusals import vocabulary_parallel
from megatron_epp.mcore.certify.adapters import adapt, gradient
from megatron_epp.mcore.certify.flags import describe, parsed, scaled
from megatron_epp.mcore.certify.models import begin, join, plain_model
from megatron_epp.mcore.certify.routing import RoutingNotes
from megatron_epp.mcore.certify.shards import fill, shards
from megatron_epp.mcore.flags import refusals_as_value_errors
from megatron_epp.mcore.model.kinds.experts import lockstep_of
from megatron_epp.mcore.model.kinds.registry import letters_of_parts

# Added to every weight: norms of exactly one and biases of zero would hide what is left out.
JITTER = 0.1


class Plain:
    """Nothing of ours is in its path but the CPU host: local layers, Megatron's own attention with
    a causal mask, gradients straight from autograd.
    """

    def __init__(self, role: Role):
        self.seed = role.seed
        join(role.folder / "meeting of one", 0, 1, role.patience)
        self.model: Any = None
        self.frame: Frame | None = None

    def prepare(
        self, flags: Sequence[str], degrees: Degrees, overlap: bool, lora_rank: int
    ) -> Prepared:
        """Read the flags and build the model. ValueError: flags that cannot be used."""
        small = scaled(parsed(flags), degrees, overlap, lora_rank)
        args = small.plain
        begin(args, self.seed)
        with refusals_as_value_errors():
            self.model = plain_model(args)
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
            splits=True,
            lockstep=lockstep_of(small.elastic),
            vocabulary_parallel=vocabulary_parallel(small.elastic),
            ranks=degrees.cp,
        )
        return Prepared(
            pickle.dumps(small.elastic),
            self.frame,
            weights,
            describe(small.layers, small.elastic, lora_rank),
        )

    def compute(self, number: int) -> Reference:
        """Loss and gradients of batch ``number``."""
        assert self.frame is not None, "the model is prepared before it computes"
        drawn = draw(self.seed, number, self.frame)
        for parameter in self.model.parameters():
            parameter.grad = None
        pairs = zip(drawn.tokens, drawn.loss_masks, strict=True)
        losses = [self._document(tokens, mask) for tokens, mask in pairs]
        loss = torch.stack(losses).sum() / drawn.loss_tokens
        # Auxiliary losses are weighted by tokens, as the loss is, and divided with it.
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1 / drawn.loss_tokens))
        loss.backward()
        self.routing.note_counts()
        self._finish_routers()
        gradients = whole(shards(self.model, lambda one: gradient(one, "grad")))
        return Reference(loss.item(), gradients, self.routing.taken())

    def _finish_routers(self) -> None:
        """Do to routers what Megatron's finalize_model_grads does."""
        config = get_model_config(self.model)
        if config.moe_router_enable_expert_bias:
            _update_router_expert_bias([self.model], config)
        if config.num_moe_experts:
            reset_model_temporary_tensors(config, [self.model])

    def _document(self, tokens: numpy.ndarray, loss_mask: numpy.ndarray) -> torch.Tensor:
        """The loss summed over one document."""
        length = len(loss_mask)
        tokens_1T = torch.from_numpy(tokens)[None]
        token_losses_1T = self.model(
            tokens_1T[:, :-1],
            torch.arange(length)[None],
            torch.ones(1, 1, length, length, dtype=torch.bool).triu(1),
            labels=tokens_1T[:, 1:],
        )
        return (token_losses_1T[0] * torch.from_numpy(loss_mask)).sum()
