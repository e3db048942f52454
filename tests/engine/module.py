"""Replacement of the compiled module ``transformer_engine_torch``."""

import types
from collections.abc import Callable
from typing import Any

from tests.engine import attention, enums, norms, optimizers, products, rotary, row_padding
from tests.engine.device import CUBLASLT, CUDNN
from tests.engine.fp8 import primary, quantizers

NAME = "transformer_engine_torch"


class EmulatedKernels(types.ModuleType):
    """Module of the implemented functions; any other function raises an error when called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def unwritten(*args: Any, **others: Any) -> Any:
            raise NotImplementedError(
                f"tests.engine: {NAME}.{name} is not written; add it to tests/engine"
            )

        return unwritten


class CommOverlapHelper:
    """Placeholder for overlap of communication with matrix products, which is not implemented."""

    def __init__(self, *args: Any, **others: Any):
        raise NotImplementedError(f"tests.engine: {type(self).__name__} is not written")


class CommOverlap(CommOverlapHelper):
    """Placeholder for matrix products that overlap with collectives."""


class CommOverlapP2P(CommOverlapHelper):
    """Placeholder for matrix products that overlap with a ring of messages."""


class CommOverlapCore(CommOverlapHelper):
    """Placeholder for Transformer Engine's base class of products that overlap."""


def emulated_kernels() -> types.ModuleType:
    """Return the replacement module."""
    module = EmulatedKernels(NAME)
    for name, value in {**_functions(), **_names()}.items():
        setattr(module, name, value)
    return module


def _names() -> dict[str, Any]:
    classes = (CommOverlapHelper, CommOverlap, CommOverlapP2P, CommOverlapCore)
    enumerations = {
        name: value
        for name, value in vars(enums).items()
        if isinstance(value, type) and value.__module__ == enums.__name__
    }
    return {one.__name__: one for one in classes} | enumerations


def _functions() -> dict[str, Callable[..., Any]]:
    table: dict[str, Callable[..., Any]] = {}
    modules: tuple[types.ModuleType, ...] = (
        attention,
        norms,
        optimizers,
        primary,
        products,
        quantizers,
        rotary,
        row_padding,
    )
    for module in modules:
        table |= {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, types.FunctionType)
            and value.__module__ == module.__name__
            and not name.startswith("_")
        }
    return table | {
        "get_cudnn_version": lambda: CUDNN,
        "get_cublasLt_version": lambda: CUBLASLT,
        "device_supports_multicast": lambda device_id=-1: False,
        "get_stream_priority_range": lambda device_id=-1: (0, -5),
        "ubuf_built_with_mpi": lambda: False,
        "nvte_built_with_cublasmp": lambda: False,
    }
