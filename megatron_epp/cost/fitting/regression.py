"""Non-negative linear regression of relative errors, with its quality on held-out rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ROUNDS = 6  # of reweighting, which approaches the least sum of absolute relative errors
HOLD_OUT = 4  # every fourth row is held out
# Fraction of the information on any coefficients that must remain after holding out rows
_STILL_DETERMINED = 0.1
_SMALLEST_RESIDUAL = 1e-3  # below 0.1% all rows have the same weight
_PULL = 0.03  # weight of the prior relative to the information of all rows on a coefficient


@dataclass(frozen=True, slots=True)
class Quality:
    """Relative errors |predicted / measured - 1| on ``tested`` held-out rows.

    If there are too few rows to hold any out, ``tested`` is 0 and the errors are on fitted rows.
    ``rows`` is the number of all rows. ``median``, ``p90`` and ``worst`` are the median, the 90th
    percentile and the maximum of the errors.
    """

    rows: int
    tested: int
    median: float
    p90: float
    worst: float

    def __str__(self) -> str:
        on = f"{self.tested} held-out of {self.rows}" if self.tested else f"all {self.rows}"
        return (
            f"error median {self.median:.1%}, p90 {self.p90:.1%}, worst {self.worst:.1%} "
            f"on {on} rows"
        )


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients [n] of at least 0, and their quality; a column of zeros has coefficient 0."""

    coefficients: tuple[float, ...]
    quality: Quality


def fit(
    features: Sequence[Sequence[float]],
    measured: Sequence[float],
    prior: Sequence[float] | None = None,
    what: str = "seconds",
) -> Fit:
    """Fit coefficients with features @ coefficients ~ measured.

    Errors are relative to the measurement, so that short and long ops have equal weight. Outliers,
    which a busy machine causes, get less weight. All rows determine the coefficients. The quality
    comes from a second fit, which holds out about every fourth row. A row is held out only if the
    other rows still determine all coefficients.

    Args:
        features: [rows, n].
        measured: [rows], each above 0.
        prior: [n], expected coefficients up to a common factor. Coefficients that the rows do not
            separate stay near ``prior``. None: the sum of such coefficients is divided arbitrarily.
        what: name of the measured quantity, for error messages.

    Raises:
        ValueError: there are no rows, the numbers of rows differ, a feature is not finite, or a
            measurement is not a finite number above 0.
    """
    rows_RN = np.asarray(features, np.float64)
    values_R = np.asarray(measured, np.float64)
    if rows_RN.ndim != 2 or not len(rows_RN) or len(rows_RN) != len(values_R):
        raise ValueError(f"{len(values_R)} measurements of {len(rows_RN)} rows: expected as many")
    wrong_R = ~(np.isfinite(rows_RN).all(1) & np.isfinite(values_R) & (values_R > 0))
    if wrong_R.any():
        row = int(wrong_R.argmax())
        raise ValueError(
            f"{what}: measurement {row + 1} of {len(values_R)} is {values_R[row]:g}, its "
            f"quantities {rows_RN[row].tolist()}; expected finite numbers and a measurement above 0"
        )
    prior_N = None
    if prior is not None:
        prior_N = np.asarray(prior, np.float64)
        prior_N = prior_N / np.median(np.maximum(rows_RN @ prior_N, 1e-30) / values_R)
    coefficients = _robust(rows_RN, values_R, prior_N)
    held_out_R = _held_out(rows_RN / values_R[:, None])
    tested = int(held_out_R.sum())
    if tested:
        without = _robust(rows_RN[~held_out_R], values_R[~held_out_R], prior_N)
        errors = np.abs(rows_RN[held_out_R] @ without / values_R[held_out_R] - 1)
    else:
        errors = np.abs(rows_RN @ coefficients / values_R - 1)
    quality = Quality(
        len(values_R),
        tested,
        float(np.median(errors)),
        float(np.quantile(errors, 0.9)),
        float(errors.max()),
    )
    return Fit(tuple(map(float, coefficients)), quality)


def _held_out(rows_RN: np.ndarray) -> np.ndarray:
    """Return a mask [rows] of the rows to hold out: at most one of every four.

    More rows than coefficients always remain. A row is held out only if the other rows still
    determine every coefficient. For example, some row with each recompute mode must remain. In an
    orthonormal basis of the rows' span, all rows together have information 1 in every direction.
    The remaining rows must have at least information _STILL_DETERMINED in every direction.
    """
    scale_N = np.linalg.norm(rows_RN, axis=0)
    basis_RK, singular_K, _ = np.linalg.svd(
        rows_RN[:, scale_N > 0] / scale_N[scale_N > 0], full_matrices=False
    )
    basis_RK = basis_RK[:, singular_K > 1e-9 * singular_K.max(initial=0.0)]
    held_out_R = np.zeros(len(rows_RN), bool)
    determined_KK = np.eye(basis_RK.shape[1])
    for row, direction_K in enumerate(basis_RK):
        if (row + 1) // HOLD_OUT <= held_out_R.sum():
            continue
        if len(rows_RN) - held_out_R.sum() - 1 <= basis_RK.shape[1]:
            break
        without_KK = determined_KK - np.outer(direction_K, direction_K)
        if np.linalg.eigvalsh(without_KK).min(initial=1.0) >= _STILL_DETERMINED:
            determined_KK, held_out_R[row] = without_KK, True
    return held_out_R


def _robust(rows_RN: np.ndarray, values_R: np.ndarray, prior_N: np.ndarray | None) -> np.ndarray:
    """Return coefficients with the least sum of absolute relative errors, by reweighting."""
    relative_RN = rows_RN / values_R[:, None]
    scale_N = np.linalg.norm(relative_RN, axis=0)
    used = scale_N > 0
    scaled_RN = relative_RN[:, used] / scale_N[used]
    weight_R = np.ones(len(values_R))
    solution = np.zeros(used.sum())
    for _ in range(ROUNDS):
        root_R = np.sqrt(weight_R)
        matrix, target = scaled_RN * root_R[:, None], root_R
        if prior_N is not None:
            pull = _PULL * np.sqrt(weight_R.mean())
            matrix = np.vstack((matrix, pull * np.eye(len(solution))))
            target = np.concatenate((target, pull * (prior_N * scale_N)[used]))
        solution = nnls(matrix, target)
        weight_R = 1 / np.maximum(np.abs(scaled_RN @ solution - 1), _SMALLEST_RESIDUAL)
    coefficients = np.zeros(rows_RN.shape[1])
    coefficients[used] = solution / scale_N[used]
    return coefficients


def nnls(matrix_RN: np.ndarray, target_R: np.ndarray) -> np.ndarray:
    """Return the x >= 0 that minimises |matrix @ x - target| (Lawson and Hanson's active sets)."""
    columns = matrix_RN.shape[1]
    solution = np.zeros(columns)
    passive = np.zeros(columns, bool)
    tolerance = 1e-12 * max(1.0, float(np.abs(matrix_RN.T @ target_R).max(initial=0.0)))
    for _ in range(3 * columns + 10):
        gradient = matrix_RN.T @ (target_R - matrix_RN @ solution)
        gradient[passive] = -np.inf
        if not columns or gradient.max() <= tolerance:
            break
        passive[gradient.argmax()] = True
        while passive.any():
            trial = np.zeros(columns)
            trial[passive] = np.linalg.lstsq(matrix_RN[:, passive], target_R, rcond=None)[0]
            if trial[passive].min() > 0:
                solution = trial
                break
            # Move towards the trial until the first coefficient reaches 0, and fix it there.
            leaving = passive & (trial <= 0)
            step = (solution[leaving] / (solution[leaving] - trial[leaving])).min()
            solution = solution + step * (trial - solution)
            passive &= solution > tolerance
            solution[~passive] = 0.0
        else:
            solution = np.zeros(columns)
    return solution
