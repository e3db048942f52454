"""Compares gradients of parts of the model with the plain model's: largest error, and coverage."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy

# Below this share of the largest gradient a reference is rounding noise around an exact zero (the
# bias of normed keys: softmax does not feel a constant), and has no relative error of its own.
NOISE = 1e-12
# A few numbers of a layer with a state: how fast each head's state decays, and what passes it by.
# Their gradients are sums over all rows and channels of terms that nearly cancel, 1e-5 of the terms
# where a state decays within a row. So rounding is judged beside the other gradients of their
# module, which are sums of the same terms that do not.
CANCELLING = ("A_log", "dt_bias", "D")


@dataclass(frozen=True, slots=True)
class Shard:
    """``values`` stand at ``where`` of the whole model's tensor ``key`` of shape ``shape``.

    Leading whole numbers in ``where`` count layers, whose tensors share one key.
    """

    key: str
    shape: tuple[int, ...]
    where: tuple[int | slice, ...]
    values: numpy.ndarray

    @property
    def layer(self) -> tuple[int, ...]:
        return tuple(place for place in self.where if isinstance(place, int))

    @property
    def name(self) -> str:
        """The key with the layer's number, as the user's checkpoint would call it."""
        if not self.layer:
            return self.key
        return self.key.replace("layers.", f"layers.{'.'.join(map(str, self.layer))}.", 1)


def assembled(shards: Iterable[Shard]) -> dict[str, numpy.ndarray]:
    """The whole tensors that ``shards`` make up; every element is there, or it is our own bug."""
    tensors: dict[str, numpy.ndarray] = {}
    for shard in shards:
        tensor = tensors.setdefault(shard.key, numpy.full(shard.shape, numpy.nan))
        tensor[shard.where] = shard.values
    for key, tensor in tensors.items():
        assert not numpy.isnan(tensor).any(), f"{key} is not whole"
    return tensors


@dataclass(frozen=True, slots=True)
class WorstGradient:
    """The largest error of all parameters, and whose it is."""

    error: float
    name: str


def worst_gradient(
    parts: Iterable[Shard],
    reference: Mapping[str, numpy.ndarray],
    own: Mapping[str, numpy.ndarray] | None = None,
    rounded: bool = False,
) -> WorstGradient:
    """max |difference| / max |reference| of each parameter (of those in CANCELLING, of their
    module), the largest of all; with ``own``, the plain model's gradients in fewer digits,
    |difference| / |own - reference| in the 2-norm; of those ``rounded``, |difference| / |reference|
    in it.

    Every copy is judged: those of data-parallel replicas, and of tied embeddings on two stages. A
    gradient that is not finite, or that no rank has computed, counts as infinitely wrong.
    """
    if own is not None:
        error_of = _in_own_errors(reference, own)
    else:
        error_of = (_in_norm if rounded else _relative)(reference)
    seen = {key: numpy.zeros(tensor.shape, dtype=bool) for key, tensor in reference.items()}
    worst = WorstGradient(0.0, "")
    for part in parts:
        seen[part.key][part.where] = True
        error = error_of(part)
        if not error < worst.error:  # nor where it is no number
            worst = WorstGradient(error if numpy.isfinite(error) else numpy.inf, part.name)
    for key, compared in seen.items():
        if not compared.all():
            return WorstGradient(numpy.inf, f"{key} (computed by no rank)")
    return worst


def _relative(reference: Mapping[str, numpy.ndarray]) -> Callable[[Shard], float]:
    most = {key: float(abs(tensor).max()) for key, tensor in reference.items()}
    largest = max(most.values())

    def error_of(part: Shard) -> float:
        expected = reference[part.key][part.where]
        scale = float(abs(reference[part.key][part.layer]).max())
        module, _, name = part.key.rpartition(".")
        if name in CANCELLING:
            scale = max(of for key, of in most.items() if key.startswith(f"{module}."))
        if scale < NOISE * largest:
            scale = largest
        return float(abs(part.values - expected).max(initial=0.0)) / scale

    return error_of


def _in_norm(reference: Mapping[str, numpy.ndarray]) -> Callable[[Shard], float]:
    def error_of(part: Shard) -> float:
        difference = float(numpy.linalg.norm(part.values - reference[part.key][part.where]))
        size = float(numpy.linalg.norm(reference[part.key][part.layer]))
        return difference / size if difference else 0.0

    return error_of


def _in_own_errors(
    reference: Mapping[str, numpy.ndarray], own: Mapping[str, numpy.ndarray]
) -> Callable[[Shard], float]:
    """Errors in those of the plain model. Of a bias of eight numbers they are a matter of luck: a
    part's counts as no less than its share of the whole parameter's, and than what most parameters
    have (relative, the median)."""
    errors = {key: own[key] - tensor for key, tensor in reference.items()}
    sizes = {key: float(numpy.linalg.norm(tensor)) for key, tensor in reference.items()}
    usual = numpy.median(
        [
            float(numpy.linalg.norm(errors[key])) / size
            for key, size in sizes.items()
            if size > NOISE * max(sizes.values())
        ]
    )

    def error_of(part: Shard) -> float:
        expected = reference[part.key][part.where]
        difference = float(numpy.linalg.norm(part.values - expected))
        parameter_error, part_error = errors[part.key], errors[part.key][part.where]
        proportional = (part_error.size / parameter_error.size) ** 0.5 * float(
            numpy.linalg.norm(parameter_error)
        )
        reference_unit = max(float(numpy.linalg.norm(part_error)), proportional)
        unit = max(reference_unit, float(usual * numpy.linalg.norm(expected)))
        if not difference:
            return 0.0
        return difference / unit if unit else numpy.inf

    return error_of
