"""Reference model: Megatron's own model in one process, which runs every document alone."""

import pickle
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import numpy
import torch
from megatron.core.utils import get_model_config
from torch import Tensor, nn
from torch.nn.functional import pad

from megatron_epp.certify.batches import Frame, RandomBatch, modes_drawn
from megatron_epp.certify.compare import assembled
from megatron_epp.certify.protocol import ModelSetup, Reference, Role
from megatron_epp.certify.trainer_results import TrainerReference
from megatron_epp.certify.trial import FLOAT64
from megatron_epp.layers.recompute.wrap import EXECUTABLE
from megatron_epp.mcore.capabilities.refusals import vocabulary_parallel
from megatron_epp.mcore.certify.adapters import adapt
from megatron_epp.mcore.certify.model_flags import choose_layers, describe, parsed, scaled
from megatron_epp.mcore.certify.models import ChangingWeights, begin, join, reference_model
from megatron_epp.mcore.certify.routing import RoutingNotes
from megatron_epp.mcore.certify.shards import fill, shards
from megatron_epp.mcore.data.row_shard import row_block
from megatron_epp.mcore.flags import replaced
from megatron_epp.mcore.job.read_flags import refusals_as_value_errors
from megatron_epp.mcore.kinds.certificates import LAYER_CERTIFICATES
from megatron_epp.mcore.kinds.registry import (
    lockstep_of,
    modes_of_kinds,
)
from megatron_epp.mcore.model.quantisation import per_tensor_scales, quantises
from megatron_epp.mcore.patching import cpu_host
from megatron_epp.mcore.placing.requested import place_of

# Noise added to every weight, because a missing norm weight of 1 or bias of 0 would not show.
JITTER = 0.1

type Gradients = dict[str, numpy.ndarray]


class ReferenceModel:
    """Megatron's model in float64, with only this package's patches for CPU-only hosts.

    The model has attention with a causal mask, and autograd computes the gradients. Its layers are
    Megatron's local layers, or Transformer Engine's layers in fp8. Some certificates need a second
    model with the same weights (``own``). The errors of the ranks are measured relative to the
    errors of this model. It has the ranks' dtype if that is not float64. It has no fp8 if an fp8
    scale covers a full tensor.
    """

    def __init__(self, role: Role):
        self.trial, self.seed = role.trial, role.trial.seed
        join(role.folder / "meeting of one", 0, 1, role.patience)
        self.model: Any = None
        self.own: Any = None
        self.frame: Any = None  # a Frame, set by prepare
        self._exactly = nullcontext if self.trial.dtype == FLOAT64 else cpu_host.double_precision

    def flags(self, turn: int) -> tuple[str, ...]:
        """Return the flags of model number ``turn``, modulo the number of the trial's models."""
        return self.trial.models[turn % len(self.trial.models)]

    def prepare(self, turn: int) -> ModelSetup:
        """Read the flags of model ``turn``, build the reference model, and return the ranks' setup.

        ``turn``, modulo the number of the trial's models, is the index of the model.

        Raises:
            ValueError: A flag is refused or not supported.
        """
        degrees, lora_rank = self.trial.degrees, self.trial.lora_rank
        raw = parsed(self.flags(turn), degrees.pp)
        asked = raw.transformer_impl
        if self.trial.device != "cpu":
            raw.transformer_impl = "local"  # this process has no GPU
        small = scaled(raw, degrees, self.trial.overlap, lora_rank, self.trial.dtype)
        # Transformer Engine's kernels on GPUs support this dtype.
        if self.trial.device != "cpu" and self.trial.dtype != FLOAT64:
            choose_layers(small.elastic, asked)
        args = small.reference
        self.in_fp8 = bool(small.elastic.fp8)
        described = describe(small.layers, small.elastic, lora_rank)
        left_out = ", not in fp8" * bool(raw.fp8 and not self.in_fp8)
        begin(args, self.seed)
        with refusals_as_value_errors(), self._exactly():
            self.model = self.built(args, small.elastic)
        if lora_rank:
            adapt(self.model, lora_rank)
        self.routing = RoutingNotes(self.model)
        weights = assembled(shards(self.model, lambda parameter: parameter.data))
        generator = numpy.random.default_rng(self.seed)
        scale = JITTER * args.init_method_std
        for key, tensor in sorted(weights.items()):
            weights[key] = tensor + scale * generator.standard_normal(tensor.shape)
            if self.trial.dtype != FLOAT64:
                inner = torch.from_numpy(weights[key]).to(small.elastic.params_dtype)
                weights[key] = inner.double().numpy()
        if small.own is not None:
            self._as_own = self._exactly if small.own.params_dtype == torch.float64 else nullcontext
            with self._as_own():
                self.own = self.built(small.own, small.elastic).to(small.own.params_dtype)
            fill(self.own, weights)
        fill(self.model, weights)
        self.weights = ChangingWeights(*filter(None, (self.model, self.own)))
        # Empty if errors are measured relative to the errors of ``own``.
        exact = self.in_fp8 and small.own is None
        self.quantised = quantised_keys(self.model) if exact else frozenset()
        self.rows = row_block(small.elastic)
        modes = modes_drawn(EXECUTABLE + modes_of_kinds(args))
        sharded, place = vocabulary_parallel(small.elastic), place_of(small.elastic)
        # If ranks share a tensor, each rank has a separate scale for its shard.
        shared = degrees.tp * degrees.cp * small.elastic.expert_model_parallel_size > 1
        exact = per_tensor_scales(small.elastic) and not shared
        self.frame = Frame(
            args.padded_vocab_size,
            small.layers,
            degrees.dp,
            modes,
            lockstep=lockstep_of(small.elastic),
            vocabulary_parallel=sharded,
            ranks=degrees.cp,
            place=place,
            alone=self.rows * exact if self.trial.dtype == FLOAT64 else 0,
        )
        return ModelSetup(
            pickle.dumps(small.elastic),
            self.frame,
            weights,
            "\n".join(filter(None, (described + left_out, replaced.warning(raw)))),
        )

    def built(self, args: Any, elastic: Any) -> Any:
        """Return the reference model for ``args``, with the checkpoint keys of args ``elastic``."""
        return reference_model(args, elastic.transformer_impl != args.transformer_impl)

    def compute(self, number: int) -> Reference:
        """Return the loss and gradients of batch ``number``."""
        drawn = self.frame.draw(self.seed, number)
        if self.in_fp8:
            self.weights.change()
        # Auxiliary losses are weighted by tokens, like the loss, and divided with it.
        for kind in LAYER_CERTIFICATES:
            kind.weigh_losses(torch.tensor(1.0))
        with self._exactly():
            losses, gradients = self._of_documents(self.model, drawn)
        routed, loss = self.routing.taken(), sum(float(one.sum()) for one in losses)
        loss /= drawn.loss_tokens
        own, unit = None, abs(loss)
        if self.own is not None and not self.frame.is_alone(number):
            with self._as_own():
                losses_alone, own = self._of_documents(self.own, drawn)
            self.routing.taken()
            # However the errors of tokens add up, their mean is at most this.
            unit = off(losses_alone, losses) / drawn.loss_tokens**0.5
        return TrainerReference(
            gradients,
            own,
            self.quantised,
            loss,
            unit,
            drawn.loss_tokens,
            self.trial.degrees.dp,
            routed,
        )

    def _of_documents(self, model: Any, drawn: RandomBatch) -> tuple[list[Tensor], Gradients]:
        """Run each document alone; return its masked losses [T], and gradients of the mean loss."""
        sums, losses = Sums(model, drawn.loss_tokens), []
        for document in range(len(drawn.tokens)):
            tokens_T, labels_T, mask_T = map(torch.from_numpy, drawn.sequence(document))
            losses_T = token_losses(model, tokens_T[None], labels_T[None], mask_T, self.rows)
            losses_T = losses_T * mask_T
            sums.backward(losses_T.sum())
            self.routing.note_mtp(mask_T.numpy())
            losses.append(losses_T.detach())
        return losses, self.gradients(model, sums)

    def gradients(self, model: Any, sums: "Sums") -> Gradients:
        """Update routers' biases as in training; return the full gradients by checkpoint key."""
        if model is self.model:
            self.routing.note_counts()
        config = get_model_config(model)
        for kind in LAYER_CERTIFICATES:
            kind.finish_reference(model, config)
        return assembled(shards(model, sums.of))


def token_losses(
    model: Any,
    tokens_1T: Tensor,
    labels_1T: Tensor,
    mask_T: Tensor | None = None,
    rows: int = 1,
    **besides: Tensor,
) -> Tensor:
    """Return the losses [T] of one document, which the model runs alone.

    The document is padded to a multiple of ``rows``. Its tokens do not attend to the padding.

    Args:
        model: The model.
        tokens_1T: [1, tokens] Tokens of the document.
        labels_1T: [1, tokens] Labels of the document.
        mask_T: [tokens] Loss mask of the document, which MTP losses use; None: no mask.
        rows: The document is padded to a multiple of this number of tokens.
        **besides: More arguments of the model's forward.
    """
    length = tokens_1T.shape[1]
    missing = -length % rows
    places_T = torch.arange(length + missing)
    losses_1T = model(
        pad(tokens_1T, (0, missing)),
        places_T[None],
        torch.ones(1, 1, length + missing, length + missing, dtype=torch.bool).triu(1),
        labels=pad(labels_1T, (0, missing)),
        **({} if mask_T is None else {"loss_mask": pad(mask_T, (0, missing))[None].double()}),
        # Without this mask, routers would count the padding.
        **({"padding_mask": (places_T >= length)[None]} if missing else {}),
        **besides,
    )
    return losses_1T[0, :length]


def quantised_keys(model: nn.Module) -> frozenset[str]:
    """Return the checkpoint keys of weights of ``model`` whose GEMMs run in fp8."""
    linears = {
        weight
        for module in filter(quantises, model.modules())
        for weight in module.parameters(recurse=False)
        if weight.dim() > 1
    }
    marked = shards(model, lambda weight: torch.full_like(weight, weight in linears))
    return frozenset(one.key for one in marked if one.values.any())


def off(losses: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the 2-norm of all elements of ``losses`` minus ``expected``."""
    pairs = zip(losses, expected, strict=True)
    return float(torch.cat([(a.double() - b).flatten() for a, b in pairs]).norm())


class Sums:
    """Gradients of ``model``, accumulated in float64 from backward passes in any dtype.

    As in the trainer, the gradients are divided by ``tokens`` after the accumulation.
    """

    def __init__(self, model: Any, tokens: int = 1):
        self._model, self._tokens = model, tokens
        self._sums = {one: torch.zeros_like(one, dtype=torch.float64) for one in model.parameters()}

    def backward(self, loss: Tensor) -> None:
        """Run the backward of ``loss`` and add its gradients to the sums."""
        loss.backward()
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                self._sums[parameter] += parameter.grad
                parameter.grad = None

    def of(self, parameter: nn.Parameter) -> Tensor:
        """Return the accumulated gradient of ``parameter``, divided by the number of tokens."""
        return self._sums[parameter] / self._tokens
