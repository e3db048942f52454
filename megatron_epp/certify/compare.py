"""Comparison of the ranks' gradients with those of the reference model."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy

# Below this fraction of the largest gradient, a reference value is rounding noise around an exact
# zero, such as that of the bias of normed keys. It has no relative error of its own.
NOISE = 1e-12
# Small parameters of SSM layers: the decay of each head's state, and its skip connection. Their
# gradients are sums over all rows and channels of terms that nearly cancel, to 1e-5 of the terms if
# a state decays within a row. Their errors are therefore relative to the other gradients of their
# module, which are sums of the same terms without cancellation.
CANCELLING = ("A_log", "dt_bias", "D")


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of a tensor of the model: the elements ``values`` at index ``where``.

    ``key`` and ``shape`` are those of the complete tensor. The complete tensor stacks the
    parameters of all layers, so the leading integers in ``where`` are layer indices.
    """

    key: str
    shape: tuple[int, ...]
    where: tuple[int | slice, ...]
    values: numpy.ndarray

    @property
    def layer(self) -> tuple[int, ...]:
        """Index of the layer."""
        return tuple(place for place in self.where if isinstance(place, int))

    @property
    def name(self) -> str:
        """Key with the layer's number, as checkpoints name the parameter."""
        if not self.layer:
            return self.key
        return self.key.replace("layers.", f"layers.{'.'.join(map(str, self.layer))}.", 1)


def assembled(shards: Iterable[Shard]) -> dict[str, numpy.ndarray]:
    """Return the complete tensors by key; ``shards`` must contain every element."""
    tensors: dict[str, numpy.ndarray] = {}
    for shard in shards:
        tensor = tensors.setdefault(shard.key, numpy.full(shard.shape, numpy.nan))
        tensor[shard.where] = shard.values
    for key, tensor in tensors.items():
        assert not numpy.isnan(tensor).any(), f"{key} is not whole"
    return tensors


@dataclass(frozen=True, slots=True)
class WorstGradient:
    """Largest error of all parameters, and the name of the parameter with this error."""

    error: float
    name: str


def worst_gradient(
    parts: Iterable[Shard],
    reference: Mapping[str, numpy.ndarray],
    own: Mapping[str, numpy.ndarray] | None = None,
    rounded: bool = False,
) -> WorstGradient:
    """Return the largest error of all parameters.

    The error of a parameter is max |difference| / max |reference|. For parameters in CANCELLING,
    the denominator is the maximum over all parameters of their module. A denominator below NOISE
    times the maximum over all parameters is replaced by this maximum. With ``own``, the error is
    |difference| / |own - reference| in the 2-norm; with ``rounded``, |difference| / |reference| in
    the 2-norm. Every copy of a parameter is compared: those of all replicas, and those of tied
    embeddings on the first and the last stage. A gradient that is not finite, or that no rank
    computed, has an infinite error.

    Args:
        parts: gradients of the ranks.
        reference: gradients of the reference model, by key.
        own: gradients of the reference model in the certified dtype, or without fp8. None: errors
            are relative to ``reference``.
        rounded: whether the gradients are those of fp8 weights.
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
        if not error < worst.error:  # also if it is NaN
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
    """Return a function from a shard to its error, in units of the reference model's error.

    The unit is the 2-norm of ``own - reference`` in the shard. In a few elements this norm can be
    small by chance, so the unit has two lower bounds. One is the norm for the complete parameter,
    times the root of the shard's fraction of its elements. The other is the shard's norm times the
    median relative error of all parameters.
    """
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
