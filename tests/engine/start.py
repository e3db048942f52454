"""Installation of the emulation: once per process, on a CPU-only host, before Megatron."""

import functools
import importlib
import os
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.engine import flash
from tests.engine.device import DEVICES, CompiledKernel, ReportedDevice
from tests.engine.module import NAME, EmulatedKernels, emulated_kernels

PACKAGE = "transformer_engine"
# Folder into which scripts/setup_env.sh installs Transformer Engine's Python. It is outside the
# packages, because without its compiled part it must not be found by other importers.
FOLDER = Path(sys.prefix) / "te_on_cpu"
_WIDE = torch.float64


def is_installed() -> bool:
    """Return whether Transformer Engine's Python uses the emulated kernels in this process."""
    return isinstance(sys.modules.get(NAME), EmulatedKernels)


def install(device: str) -> None:
    """Install the emulated kernels in this process, and make torch report ``device``.

    Raises:
        ValueError: if the device is unknown, or Transformer Engine's Python is missing.
    """
    if device not in DEVICES:
        known = ", ".join(DEVICES)
        raise ValueError(f"EPP_ENGINE_DEVICE={device}: expected one of {known}")
    if isinstance(sys.modules.get(NAME), types.ModuleType):
        return
    if not (FOLDER / PACKAGE / "pytorch").is_dir():
        raise ValueError(
            f"no Transformer Engine in {FOLDER}: run bash scripts/setup_env.sh, or pip install "
            f"--no-deps --target {FOLDER} -r requirements-te.txt (1.3 MB)"
        )
    flash.register()
    _be(DEVICES[device])
    sys.path.append(str(FOLDER))
    sys.modules[NAME] = emulated_kernels()
    # Its ONNX export imports packages that nothing else needs.
    sys.modules[f"{PACKAGE}.pytorch.onnx_extensions"] = _nothing("onnx_extensions")
    _import()
    _allow_modules()
    _allow_blocks()
    _widen()


def _be(device: ReportedDevice) -> None:
    """Make torch report the properties of ``device`` on this CPU-only host."""
    properties: Any = torch.cuda.get_device_properties(0)
    properties.name = device.name
    properties.major, properties.minor = device.capability
    properties.multi_processor_count = device.multiprocessors
    # For Python's queries only: torch's operations do not depend on it.
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment]
    tensors: Any = torch.Tensor
    tensors.record_stream = lambda self, stream: None
    # Also queried by scripts for GPUs (scripts/gpu).
    cuda: Any = torch.cuda
    cuda._sleep = lambda cycles: None
    cuda._compile_kernel = CompiledKernel
    cuda.memory_snapshot = list
    # gloo coalesces what Python has collected; it has no device queue.
    together: Any = torch.distributed._coalescing_manager

    def manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Any:
        return together(group, None, async_ops)

    torch.distributed._coalescing_manager = manager  # type: ignore[assignment]
    # It reads all tensors in the first one's dtype: gather mixed fp8 and other parameters as bytes.
    groups: Any = torch.distributed.ProcessGroup
    gather = groups.allgather_into_tensor_coalesced

    def gather_bytes(group: Any, outputs: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        both = ([x.view(torch.uint8) for x in tensors] for tensors in (outputs, inputs))
        return gather(group, *both, *more, **named)

    groups.allgather_into_tensor_coalesced = gather_bytes


def _nothing(name: str) -> types.ModuleType:
    """Return a module whose attributes are decorators that change nothing."""

    class Nothing(types.ModuleType):
        def __getattr__(self, attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            return Nothing(f"{self.__name__}.{attribute}")

        def __call__(self, *args: Any, **others: Any) -> Any:
            return args[0] if args and callable(args[0]) else self

    return Nothing(name)


def _import() -> None:
    """Import Transformer Engine without its libraries.

    The package's ``common`` module opens the libraries when it is imported, except in builds of
    the package, which set NVTE_PROJECT_BUILDING; this function sets it, too. The layers call
    ``common`` to load the compiled module; this call is replaced by one that does nothing.
    """
    building = "NVTE_PROJECT_BUILDING"
    before = os.environ.get(building)
    os.environ[building] = "1"
    try:
        # The package itself imports its layers, so its common part is imported first, from its
        # folder.
        folder = types.ModuleType(PACKAGE)
        folder.__path__ = [str(FOLDER / PACKAGE)]
        sys.modules[PACKAGE] = folder
        common: Any = importlib.import_module(f"{PACKAGE}.common")
        common.load_framework_extension = lambda framework: None
        del sys.modules[PACKAGE]
        importlib.import_module(PACKAGE).common = common  # type: ignore[attr-defined]
    finally:
        if before is None:
            del os.environ[building]
        else:
            os.environ[building] = before


def _allow_modules() -> None:
    """Make torch report a GPU while a layer is constructed, because layers require a GPU."""
    base: Any = importlib.import_module(f"{PACKAGE}.pytorch.module.base")
    module = base.TransformerEngineBaseModule
    unpatched = module.__init__

    @functools.wraps(unpatched)
    def make(self: Any, *args: Any, **others: Any) -> None:
        says = torch.cuda.is_available
        torch.cuda.is_available = lambda: True
        try:
            unpatched(self, *args, **others)
        finally:
            torch.cuda.is_available = says

    module.__init__ = make


def _allow_blocks() -> None:
    """Allow fp8 in blocks, which Transformer Engine refuses if torch's CUDA is older than 12.9."""
    quantization: Any = importlib.import_module(f"{PACKAGE}.pytorch.quantization")
    quantization._FP8_BLOCK_SCALING_SUPPORT = True, ""


def _widen() -> None:
    """Add float64 to Transformer Engine's tables of dtypes.

    For float64, attention kernels are selected as for bf16. Sinks stay in float64, although
    Transformer Engine would convert them to float32.
    """
    constants: Any = importlib.import_module(f"{PACKAGE}.pytorch.constants")
    constants.TE_DType[_WIDE] = constants.TE_DType_To_Torch[_WIDE] = _WIDE
    attention = f"{PACKAGE}.pytorch.attention.dot_product_attention"
    utils: Any = importlib.import_module(f"{attention}.utils")
    unpatched = utils.get_attention_backend

    @functools.wraps(unpatched)
    def choose(attention_params: Any = None) -> Any:
        if attention_params is not None and attention_params.qkv_dtype == _WIDE:
            attention_params = replace(attention_params, qkv_dtype=torch.bfloat16)
        return unpatched(attention_params)

    utils.get_attention_backend = choose
    backends: Any = importlib.import_module(f"{attention}.backends")
    forward = backends.FusedAttention.forward

    @functools.wraps(forward)
    def attend(self: Any, query_layer: torch.Tensor, *args: Any, **others: Any) -> Any:
        if query_layer.dtype != _WIDE:
            return forward(self, query_layer, *args, **others)
        backends.all = lambda checks: True  # replaces the check that operands are 16-bit
        try:
            return forward(self, query_layer, *args, **others)
        finally:
            del backends.all

    backends.FusedAttention.forward = attend
    module: Any = importlib.import_module(f"{attention}.dot_product_attention")
    original = module.DotProductAttention.forward

    @functools.wraps(original)
    def call(self: Any, query_layer: torch.Tensor, *args: Any, **others: Any) -> Any:
        sinks = vars(self).get("softmax_offset")
        if sinks is None or query_layer.dtype != _WIDE:
            return original(self, query_layer, *args, **others)
        self.softmax_offset = _Unrounded(sinks)
        try:
            return original(self, query_layer, *args, **others)
        finally:
            self.softmax_offset = sinks

    module.DotProductAttention.forward = call


class _Unrounded:
    """Wrapper of a tensor whose ``to`` returns the tensor in its original dtype."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def reshape(self, *shape: int) -> "_Unrounded":
        return _Unrounded(self._tensor.reshape(*shape))

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        return self._tensor
