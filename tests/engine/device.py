"""GPU properties that Transformer Engine's Python queries."""

from dataclasses import dataclass
from typing import Any

CUDNN = 91900  # 9.19.0, as with torch 2.11
CUBLASLT = 130100


@dataclass(frozen=True, slots=True)
class ReportedDevice:
    """Name, compute capability and number of multiprocessors of a GPU."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int


DEVICES = {
    "h100": ReportedDevice("NVIDIA H100 80GB HBM3", (9, 0), 132),
    "b200": ReportedDevice("NVIDIA B200", (10, 0), 148),
}


class CompiledKernel:
    """Replacement of a kernel that ``torch.cuda._compile_kernel`` compiles; calls do nothing."""

    def __init__(self, source: str, name: str):
        self.name = name

    def set_shared_memory_config(self, nbytes: int) -> None:
        """Do nothing."""

    def __call__(self, *launch: Any, **others: Any) -> None:
        """Do nothing."""
