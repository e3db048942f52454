"""What ops of a stage take: guessed from the model's shape, then measured as the loop runs.

    seconds of an op = token x tokens + pair x query-key pairs + op

No model is built and no time is spent to measure: the ops of the calls themselves are the
measurements. What is guessed is right up to a factor that is the same for all micro-batches, and an
order depends on no such factor.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_epp.cost.regression import fit
from megatron_epp.ir import KIND_CODE, OF_LAYERS, Kind, Timed

CALLS = 4  # whose ops count
EAGER = 3  # as many first calls are each fitted at once, then every
SELDOM = 8
SPLIT_PRICE = 1.04  # I and W together over B, where they have not been measured
_FLOPS_PER_SECOND = 1e12  # of nothing in particular
_OP_TOKENS = 32  # an op costs as much as so many tokens besides, until it is measured
FEATURES = 3  # tokens, pairs, 1

F, B, I, W = (KIND_CODE[Kind(letter)] for letter in "FBIW")  # noqa: E741


def features(tokens: Sequence[float], pairs: Sequence[float]) -> np.ndarray:
    """[3, chunks]."""
    return np.stack([np.asarray(tokens, float), np.asarray(pairs, float), np.ones(len(tokens))])


def guessed_rates(config: Any, layers: int, vocabulary: int) -> np.ndarray:
    """[kinds, 3] of a stage of ``layers`` layers, with an output layer of ``vocabulary`` words
    (0: none), by the multiplications in them."""
    hidden = getattr(config, "hidden_size", 0) or 0
    heads = getattr(config, "num_attention_heads", 0) or 0
    size = getattr(config, "kv_channels", 0) or (hidden // heads if heads else 0)
    groups = getattr(config, "num_query_groups", 0) or heads
    ffn = getattr(config, "ffn_hidden_size", 0) or 4 * hidden
    matrices = 3 if getattr(config, "gated_linear_unit", False) else 2
    experts = getattr(config, "moe_router_topk", 1) if getattr(config, "num_moe_experts", 0) else 1
    attention = hidden * size * (2 * heads + 2 * groups)
    token = 2 * layers * (attention + experts * matrices * hidden * ffn) + 2 * hidden * vocabulary
    forward = np.array([token, 4 * layers * heads * size, 0.0]) / _FLOPS_PER_SECOND
    if not forward.any():
        forward = np.array([1.0, 0.0, 0.0]) / _FLOPS_PER_SECOND
    forward[2] = _OP_TOKENS * forward[0]
    rates = np.zeros((len(OF_LAYERS), FEATURES))
    rates[F], rates[B] = forward, 2 * forward
    rates[I] = rates[W] = SPLIT_PRICE / 2 * rates[B]
    return rates


class StageSeconds:
    """This rank's stage. ``rates`` [kinds, 3] are the latest, ``measured`` or guessed."""

    def __init__(self, guess: np.ndarray):
        self.guess = guess
        self.rates = guess
        self.measured = False
        self._calls = 0
        self._seen: deque[tuple[np.ndarray, tuple[Timed, ...]]] = deque(maxlen=CALLS)

    def saw(self, chunks_3C: np.ndarray, records: tuple[Timed, ...]) -> None:
        """A call of training is over; its ops' records, and the features of its chunks."""
        ops = tuple(record for record in records if record.op.kind in OF_LAYERS)
        self._seen.append((chunks_3C, ops))
        self._calls += 1
        if self._calls <= EAGER or self._calls % SELDOM == 0:
            self.rates = self._fitted()

    def _fitted(self) -> np.ndarray:
        rates = self.guess.copy()
        measured: dict[int, np.ndarray] = {}
        for kind in OF_LAYERS:
            rows, seconds = [], []
            for chunks_3C, ops in self._seen:
                for record in ops:
                    if record.op.kind is kind and record.seconds > 0:
                        rows.append(chunks_3C[:, record.op.chunk].tolist())
                        seconds.append(record.seconds)
            code = KIND_CODE[kind]
            if rows:
                found = fit(rows, seconds, self.guess[code].tolist())
                measured[code] = rates[code] = np.asarray(found.coefficients, dtype=float)
        if B in measured and I not in measured:
            rates[I] = rates[W] = SPLIT_PRICE / 2 * rates[B]
        elif I in measured and B not in measured:
            rates[B] = rates[I] + rates[W]
        if F not in measured or not (B in measured or I in measured):
            return self.guess  # of one kind alone the two could not be compared
        self.measured = True
        return rates
