"""GPUs as far as Transformer Engine's Python asks about them."""

from dataclasses import dataclass
from typing import Any

CUDNN = 91900  # 9.19.0, which torch 2.11 brings
CUBLASLT = 130100


@dataclass(frozen=True, slots=True)
class ReportedDevice:
    name: str
    capability: tuple[int, int]
    multiprocessors: int


DEVICES = {
    "h100": ReportedDevice("NVIDIA H100 80GB HBM3", (9, 0), 132),
    "b200": ReportedDevice("NVIDIA B200", (10, 0), 148),
}


class CompiledKernel:
    """A kernel of somebody's own source: nothing here compiles it, and a launch does nothing."""

    def __init__(self, source: str, name: str):
        self.name = name

    def set_shared_memory_config(self, nbytes: int) -> None: ...

    def __call__(self, *launch: Any, **others: Any) -> None: ...
