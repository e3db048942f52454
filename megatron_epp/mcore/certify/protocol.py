"""What the certificate's processes tell their parent, which imports neither torch nor Megatron."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy

from megatron_epp.mcore.certify.batches import Frame
from megatron_epp.mcore.certify.compare import Shard


@dataclass(frozen=True, slots=True)
class Prepared:
    """From the process with the plain model: what the ranks need to build theirs.

    ``args`` are Megatron's, pickled: the parent passes them on as they are.
    """

    args: bytes
    frame: Frame
    weights: Mapping[str, numpy.ndarray]
    description: str


@dataclass(frozen=True, slots=True)
class Reference:
    """Loss per token, and the gradient of every weight of the whole model by its key."""

    loss: float
    gradients: Mapping[str, numpy.ndarray]


@dataclass(frozen=True, slots=True)
class Computed:
    """What one rank made of a batch.

    training_loss    summed over its replica's tokens, and their number, from the rank of the last
                     stage that reports; zeros from the others. ``evaluation_loss`` likewise.
    gradients        of its part of the model, over the tokens of the whole batch
    messages         sent and received in training
    collectives      issued in training, by their name on the list (allowed_collectives.py)
    problems         what went otherwise than planned, one line each
    """

    training_loss: tuple[float, float]
    evaluation_loss: tuple[float, float]
    gradients: list[Shard]
    messages: int
    collectives: Counter[str]
    problems: list[str]
