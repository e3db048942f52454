"""Replacements with which ``megatron.training.pretrain`` runs on a CPU-only host, over gloo.

Megatron-core 0.19 assumes CUDA in about a hundred places and has no CPU mode. Nearly all of these
places use a few names of torch, so this module replaces names in torch and not in Megatron:

    device="cuda" given to a factory (torch.zeros ...)  becomes device="cpu"
    Tensor.cuda, Tensor.to("cuda"), Module.cuda         stay on the CPU
    Tensor.type() of a CPU tensor                       returns torch.cuda.FloatTensor, as
                                                        Megatron's comparisons expect
    torch.cuda.current_device()                         returns torch.device("cpu"), which every
                                                        factory accepts
    streams, events, synchronize, memory counters       do nothing, or return 0
    torch.cuda's generator                              is the CPU's generator
    gloo's all-gather and reduce-scatter of lists       accept tensors of unequal sizes
    gloo's groups                                       share a network device

``torch.cuda.is_available()`` still returns False, because torch itself relies on it. The few
places in Megatron that need their own replacement are patch points with ``when="cpu host"``
(patch_points.py).

A ``TorchFunctionMode`` is not sufficient: it belongs to one thread, is inactive while
``Tensor.backward`` runs Python code, and costs a Python call for every operation. Replaced
functions cost a Python call only where a tensor is created.

Importing this module does nothing. With a CUDA GPU, ``install_cpu_host`` does nothing.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, override

import torch

from megatron_epp.mcore.patching import emulated_engine
from megatron_epp.mcore.patching.cpu_kernels import install_cpu_kernels
from megatron_epp.mcore.patching.gloo import share_gloo_device, take_unequal_rows
from megatron_epp.runtime.malloc_trim import keep_large_blocks

# Compiled GPU packages that Megatron would import. They cannot run on a CPU-only host. A
# Transformer Engine without its torch extension even breaks `import megatron.core`
# (core/tensor_parallel/random.py catches ModuleNotFoundError only).
BLOCKED_PACKAGES = ("transformer_engine", "transformer_engine_torch", "apex", "amp_C", "flash_attn")

_FACTORY_NAMES = """
    arange as_tensor asarray empty empty_like empty_strided eye full full_like linspace logspace
    ones ones_like rand rand_like randint randint_like randn randn_like randperm scalar_tensor
    tensor tril_indices triu_indices zeros zeros_like
"""
_FACTORIES = tuple(_FACTORY_NAMES.split())
_METHOD_FACTORIES = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
_MARK = "_megatron_epp_cpu_host"


def has_gpu() -> bool:
    """Return whether torch can use a CUDA GPU, even after :func:`install_cpu_host`."""
    return torch.cuda.is_available()


def has_gpu_kernels() -> bool:
    """Return whether GPU kernels, or an emulation of them, compute attention."""
    return has_gpu() or emulated_engine.is_started()


def is_cpu_host() -> bool:
    """Return whether the replacements are installed."""
    return hasattr(torch.cuda, _MARK)


def install_cpu_host() -> bool:
    """Make Megatron run without a GPU; return whether the replacements are installed.

    Call this function before the first import of megatron, because it blocks the import of
    Transformer Engine and apex, and disables torch.compile. A second call changes only the
    environment. With a CUDA GPU, the function does nothing and returns False.

    Raises:
        ValueError: megatron is already imported and uses Transformer Engine, the host has GPUs that
            torch cannot use and that the user has not hidden, EPP_ENGINE names no emulation, or the
            installed Megatron is not supported.
    """
    if has_gpu():
        return False
    if is_cpu_host():
        _prepare_environment()  # a forked process may have an environment unlike its server's
        return True
    _refuse_unseen_gpus()
    if "megatron.core" in sys.modules and sys.modules.get("transformer_engine") is not None:
        raise ValueError(
            "install_cpu_host() came after `import megatron.core`, which has taken Transformer "
            "Engine into use: call it before the first import of megatron"
        )
    _prepare_environment()
    _replace_factories()
    _replace_tensor_methods()
    _replace_cuda_module()
    take_unequal_rows()
    share_gloo_device()
    _keep_random_state_in_data_loaders()
    keep_large_blocks()
    setattr(torch.cuda, _MARK, True)
    emulated_engine.start()
    install_cpu_kernels()
    _quieten()

    from megatron_epp.mcore.patching import patch_points  # it imports megatron, so only now

    patch_points.install_on_cpu_host()
    return True


def _refuse_unseen_gpus() -> None:
    """Refuse to run on the CPU if there are GPUs that torch cannot use.

    If the driver is too old for torch's CUDA, torch reports no GPU. Without an error, training
    would run on the CPU for weeks.
    """
    # Both values hide all GPUs: the user has chosen the CPU.
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return
    asked = shutil.which("nvidia-smi")
    if asked is None:
        return
    query = [asked, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        listed = subprocess.run(
            query, capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return  # no driver runs: there is no GPU to use
    drivers = listed.split()
    if not drivers:
        return
    try:
        torch.cuda.init()
        reason = "no reason given"
    except (AssertionError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
    raise ValueError(
        f"nvidia-smi lists {len(drivers)} GPU(s) with driver {drivers[0]}, but torch "
        f"{torch.__version__} can use none ({reason}): torch built for CUDA 13 needs driver 580 or "
        "newer; update it, or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
    )


def cpu_defaults() -> dict[str, Any]:
    """Return the defaults of a CPU-only host for Megatron's arguments, by destination.

    The table of unsupported features refuses other values of --distributed-backend and, without an
    emulation of Transformer Engine, of --transformer-impl. Other flags, such as --num-workers,
    override the defaults. With an emulation, defaults that do not apply to its layers are left out.
    """
    left_out = _OF_ENGINE if emulated_engine.is_wanted() else ()
    return {name: value for name, value in _CPU_DEFAULTS.items() if name not in left_out}


_CPU_DEFAULTS: dict[str, Any] = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "no_persist_layer_norm": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    # With small batches on two cores, a worker process per loader costs more than it saves.
    "num_workers": 0,
}

# Defaults that do not apply to Transformer Engine's layers.
_OF_ENGINE = ("transformer_impl", "gradient_accumulation_fusion", "apply_rope_fusion")


@contextmanager
def double_precision() -> Iterator[None]:
    """Create modules in float64 in this context, and skip Megatron's casts to float32.

    In the context, ``Tensor.float()`` is the identity on float64, because Megatron's cross entropy
    and softmax cast with it. ``torch.softmax`` of a float64 tensor with dtype float32, as in
    routers, also returns float64. ``Tensor.to(torch.float32)`` is unchanged. Certificates in
    float64 run in this context; training does not.
    """
    original_float = torch.Tensor.float
    original_dtype = torch.get_default_dtype()

    @functools.wraps(original_float)
    def float_or_double(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if self.dtype == torch.float64 else original_float(self, *args, **kwargs)

    original_softmax = torch.softmax

    @functools.wraps(original_softmax)
    def softmax_or_double(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if input.dtype == torch.float64 and kwargs.get("dtype") == torch.float32:
            kwargs["dtype"] = torch.float64
        return original_softmax(input, *args, **kwargs)

    torch.softmax = softmax_or_double
    torch.Tensor.float = float_or_double  # type: ignore[assignment, method-assign]
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(original_dtype)
        torch.Tensor.float = original_float  # type: ignore[method-assign]
        torch.softmax = original_softmax


# ------------------------------------------------------------------ the stand-ins


def _prepare_environment() -> None:
    # core/jit.py fuses with torch.compile. The first step would compile C++ for minutes, and even
    # the decorators would import inductor. The variable disables compilation in code that has
    # already imported the original torch.compile.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    dynamo = sys.modules.get("torch._dynamo.config")
    if dynamo is not None:
        dynamo.disable = True  # type: ignore[attr-defined]
    torch.compile = _no_compile  # type: ignore[assignment]
    # arguments.py asserts this value for tensor parallelism on devices before Blackwell, but launch
    # scripts for GPUs export 32.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    kept = emulated_engine.PACKAGES if emulated_engine.is_wanted() else ()
    for name in BLOCKED_PACKAGES:
        if name in kept:
            continue
        if sys.modules.get(name) is None:
            sys.modules[name] = None  # type: ignore[assignment]


def _no_compile(model: Any = None, **options: Any) -> Any:
    """Return the model or a decorator, like torch.compile, but without compiling."""
    return model if model is not None else _no_compile


def _names_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``original`` so that a CUDA ``device=`` becomes the CPU, without pinned memory."""

    @functools.wraps(original)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if _names_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    return on_cpu


def _replace_factories() -> None:
    from torch.jit._builtins import _get_builtin_table
    from torch.utils._device import _device_constructors

    # Two tables of torch identify factories by object. The first call of _device_constructors
    # caches the original functions, so `with torch.device("meta")` still works. The replacements
    # are added to the second table, the builtins, so that torch.jit scripts compile.
    _device_constructors()
    builtins = _get_builtin_table()
    for name in _FACTORIES:
        original = getattr(torch, name)
        replacement = _on_cpu(original)
        if id(original) in builtins:
            builtins[id(replacement)] = builtins[id(original)]
        setattr(torch, name, replacement)
    for name in _METHOD_FACTORIES:
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))


def _without_cuda(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a ``to`` call with every CUDA device replaced by the CPU."""
    args = tuple("cpu" if _names_cuda(arg) else arg for arg in args)
    kwargs = {name: "cpu" if _names_cuda(value) else value for name, value in kwargs.items()}
    return args, kwargs


def _replace_tensor_methods() -> None:
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    original_tensor_to, original_tensor_type, original_module_to = tensor.to, tensor.type, module.to

    @functools.wraps(original_tensor_to)
    def tensor_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args, kwargs = _without_cuda(args, kwargs)
        return original_tensor_to(self, *args, **kwargs)

    @functools.wraps(original_tensor_type)
    def tensor_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name = original_tensor_type(self)
            return name.replace("torch.", "torch.cuda.", 1) if self.device.type == "cpu" else name
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return original_tensor_type(self, dtype, *args, **kwargs)

    @functools.wraps(original_module_to)
    def module_to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        args, kwargs = _without_cuda(args, kwargs)
        return original_module_to(self, *args, **kwargs)

    tensor.to = tensor_to
    tensor.type = tensor_type
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.pin_memory = lambda self, *args, **kwargs: self
    module.to = module_to
    module.cuda = lambda self, device=None: self


class CpuStream:
    """Replacement of a CUDA stream on the CPU, where every operation completes immediately."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.device = torch.device("cpu")
        self.cuda_stream = 0

    def wait_stream(self, stream: object) -> None:
        """Return at once."""

    def wait_event(self, event: object) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Record ``event``, or a new one, and return it."""
        event = event if event is not None else CpuEvent()
        event.record(self)
        return event

    def __enter__(self) -> CpuStream:
        return self

    def __exit__(self, *details: object) -> None:
        pass


class CpuEvent:
    """Replacement of a CUDA event on the CPU; it records the time of the CPU's clock."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.seconds = 0.0

    def record(self, stream: object = None) -> None:
        """Record the current time."""
        self.seconds = time.perf_counter()

    def wait(self, stream: object = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: the event has happened."""
        return True

    def elapsed_time(self, end: CpuEvent) -> float:
        """Return the milliseconds to ``end``, as torch.cuda.Event does."""
        return (end.seconds - self.seconds) * 1e3


class _NoCounters(dict):
    """Result of torch.cuda.memory_stats() without a device: every counter is 0."""

    def __missing__(self, key: str) -> int:
        return 0


def _replace_cuda_module() -> None:
    cuda: Any = torch.cuda
    cpu = torch.device("cpu")
    stream = CpuStream()
    properties = types.SimpleNamespace(
        name="cpu",
        major=9,  # from 10 on, arguments.py skips checks that the CPU also needs
        minor=0,
        total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        multi_processor_count=1,
        warp_size=32,
    )

    # A separate function for each name: torch._dynamo identifies torch's functions by object and
    # cannot be imported if two names refer to one function.
    def nothing() -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def zero() -> Callable[..., int]:
        return lambda *args, **kwargs: 0

    def get_rng_state(device: object = "cuda") -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(state: torch.Tensor, device: object = "cuda") -> None:
        torch.set_rng_state(state)

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    stand_ins: dict[str, Any] = {
        "current_device": lambda: cpu,
        "device_count": lambda: 1,
        "set_device": nothing(),
        "synchronize": nothing(),
        "empty_cache": nothing(),
        "ipc_collect": nothing(),
        "reset_peak_memory_stats": nothing(),
        "reset_max_memory_allocated": nothing(),
        "Stream": CpuStream,
        "Event": CpuEvent,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "set_stream": nothing(),
        "stream": lambda stream: nullcontext(stream),
        "is_current_stream_capturing": lambda: False,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_name": lambda device=None: properties.name,
        "mem_get_info": lambda device=None: (properties.total_memory, properties.total_memory),
        "memory_allocated": zero(),
        "max_memory_allocated": zero(),
        "memory_reserved": zero(),
        "max_memory_reserved": zero(),
        "memory_stats": lambda device=None: _NoCounters(),
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
    }
    for name, value in stand_ins.items():
        setattr(cuda, name, value)
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
        setattr(cuda.random, name, stand_ins[name])


def _keep_random_state_in_data_loaders() -> None:
    """Restore the CPU's random state after a DataLoader starts and draws a seed.

    On this host, the CPU's generator also replaces CUDA's generator. On a GPU they are separate, so
    a loader never affects dropout masks. A resumed run starts its loaders after loading the random
    state. If the seed changed that state, dropout would differ from the uninterrupted run.
    """
    from torch.utils.data import dataloader

    iterator: Any = dataloader._BaseDataLoaderIter
    original = iterator.__init__

    @functools.wraps(original)
    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        state = torch.get_rng_state()
        original(self, *args, **kwargs)
        torch.set_rng_state(state)

    iterator.__init__ = start


class _NotOnThisHost(logging.Filter):
    """Filter that drops log records on a missing GPU, and on CPU random states in GPU contexts."""

    REMARKS = ("CPU RNG state changed within GPU RNG context", "No CUDA runtime is found")

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not any(remark in message for remark in self.REMARKS)


def _quieten() -> None:
    """Silence warnings at start about packages that a CPU cannot use."""
    for name in ("megatron.core.tensor_parallel.random", "torch.utils.cpp_extension"):
        logging.getLogger(name).addFilter(_NotOnThisHost())
    for message in (
        r".*[Tt]ransformer[ _-]?[Ee]ngine.*",
        r".*[Aa]pex.*",
        r".*absl.logging is not installed.*",
        r".*'pin_memory' argument is set as true but no accelerator is found.*",
    ):
        warnings.filterwarnings("ignore", message=message)
