"""Degrees of parallelism of a certificate."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Degrees:
    """Numbers of pipeline stages, tensor-parallel ranks, replicas and context-parallel ranks."""

    pp: int
    tp: int
    dp: int
    cp: int = 1

    @property
    def ranks(self) -> int:
        """Total number of ranks: the product of the degrees."""
        return self.pp * self.tp * self.cp * self.dp

    def __str__(self) -> str:
        context_parallel = f", CP {self.cp}" if self.cp > 1 else ""
        return f"PP {self.pp}, TP {self.tp}, DP {self.dp}{context_parallel}"
