"""A GPU that computes no numbers: tensors on it have a shape, a dtype and a place, nothing else.

    tensors of the host      real: lengths, borders and positions have their values
    tensors of "cuda:0"      torch's FakeTensors: every op is judged by its shape function
    between them             a copy; what else meets on both sides is an error, as on a GPU

What would make a host wait for the device is an error, too: reading a value (``item``, ``tolist``,
a mask as an index), a copy to the host, a copy to the device from memory that is not pinned. And
the flash kernel is asked in its C++ words, whose checks torch's shape function leaves out.

Once, for the whole process (``install``), before megatron is imported; so the tests that use it run
in a process of their own. What it cannot see: values, streams, time, memory.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

DEVICE = torch.device("cuda", 0)
aten = torch.ops.aten

_pinned = WeakIdKeyDictionary()  # a tensor of the host -> True
_values = WeakIdKeyDictionary()  # a tensor of the device -> the host's that it is a copy of


class DeviceError(RuntimeError):
    """What a GPU would refuse, or would make the host wait for."""


def value_of(tensor: Tensor) -> Tensor | None:
    """What a tensor of the device was copied from, as long as it was not written to."""
    held = _values.get(tensor)
    return held[0] if held is not None and held[1] == tensor._version else None


class FakeGpu(TorchDispatchMode):
    """Ops with a tensor of the device, or that make one, are faked; all others run."""

    def __init__(self):
        super().__init__()
        self.fake = FakeTensorMode()
        self.calls: Counter[str] = Counter()  # ops on the device by name
        self._may_wait = True

    @contextmanager
    def without_waiting(self) -> Iterator[None]:
        """Within it nothing may make the host wait for the device."""
        self._may_wait = False
        try:
            yield
        finally:
            self._may_wait = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            # Asked by C++ alone, of which autograd's engine would look for the device's streams.
            return torch.device("meta")
        # So what C++ makes by itself, as a gradient of zeros, is asked to be there.
        if (there := kwargs.get("device")) is not None and there.type == "meta":
            kwargs = {**kwargs, "device": DEVICE}
        made_there = (there := kwargs.get("device")) is not None and there.type == "cuda"
        real = False
        for leaf in (*_leaves(args), *_leaves(kwargs.values())):
            if isinstance(leaf, FakeTensor):
                made_there = True
            elif isinstance(leaf, Tensor):
                real = True
        if not made_there:
            if kwargs.get("pin_memory"):  # torch asks for a real GPU
                made = func(*args, **{**kwargs, "pin_memory": False})
                _pinned[made] = True
                return made
            return func(*args, **kwargs)
        self.calls[func._schema.name.removeprefix("aten::")] += 1
        self._check(func, args, kwargs)
        source = args[0] if args and isinstance(args[0], Tensor) else None
        if real:
            args, kwargs = tree_map_only(Tensor, self._faked, (args, kwargs))
        with self.fake:
            made = func(*args, **kwargs)
        if func in _COPIES and not isinstance(source, FakeTensor) and isinstance(made, Tensor):
            _values[made] = source, made._version
        return made

    def _faked(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.fake.from_tensor(tensor)

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
        if not self._may_wait:
            _check_waiting(func, args, kwargs)
        if func is aten._flash_attention_forward.default:
            _check_flash(args[0:3], *args[3:7])
        elif func is aten._flash_attention_backward.default:
            _check_flash((args[1], args[2], args[3], args[0], args[4]), *args[6:10])
            _require(args[5].shape == (args[1].shape[1], args[1].shape[0]), "the log-sum-exps")
            _require(args[5].dtype == torch.float32, "the log-sum-exps")
            _require(args[0].stride(-1) == 1, "the gradient's last dimension")


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """torch's own ``tree_leaves`` takes longer than the op."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _leaves(value)
        else:
            yield value


_COPIES = (aten._to_copy.default,)
_INDEXES = (
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
)


def _check_waiting(func: Any, args: Any, kwargs: Any) -> None:
    if func in _COPIES:
        _check_copy(args[0], kwargs.get("device"))
    elif func is aten.copy_.default:
        waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if args[0].device.type != "cpu" or not _is_pinned(args[0]):
            _check_copy(args[1], args[0].device)
        if waits and args[0].device.type != args[1].device.type and args[1].dim() > 0:
            raise DeviceError("a copy between host and device, for which the host waits")
    elif func in _INDEXES:
        # One value where a mask says so is a masked fill, which asks nothing.
        fills = func is not aten.index.Tensor and args[2].numel() == 1
        for index in args[1]:
            if not isinstance(index, Tensor):
                continue
            if index.device != DEVICE or (index.dtype == torch.bool and not fills):
                raise DeviceError(f"{func}: the host waits for a mask, or copies an index")


def _is_pinned(tensor: Tensor) -> bool:
    return tensor in _pinned or (tensor._base is not None and tensor._base in _pinned)


def _check_copy(source: Tensor, device: torch.device | None) -> None:
    here, there = source.device.type, (device or source.device).type
    if (here, there) == ("cuda", "cpu"):
        raise DeviceError("a copy to the host, for which it waits")
    if (here, there) == ("cpu", "cuda") and source.dim() > 0 and not _is_pinned(source):
        raise DeviceError(f"a copy of {tuple(source.shape)} to the device from unpinned memory")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise DeviceError(f"the flash kernel takes no such call: {what}")


def _check_flash(
    tensors: tuple[Tensor, ...],
    queries: Tensor,
    keys: Tensor,
    most_queries: int,
    most_keys: int,
) -> None:
    """What mha_varlen_fwd and mha_varlen_bwd of torch's flash_api.cpp check, and what they trust.

    ``tensors``: q [T, H, D], k and v [S, G, D], then what has q's shape.
    """
    q, k, v, *others = tensors
    _require(q.dtype in (torch.float16, torch.bfloat16), f"{q.dtype}")
    for tensor in tensors:
        _require(tensor.device == DEVICE, f"on {tensor.device}")
        _require(tensor.dtype == q.dtype, f"{tensor.dtype} beside {q.dtype}")
        _require(tensor.dim() == 3 and tensor.stride(-1) == 1, "rows, heads and a packed head")
    heads, size = q.shape[1:]
    _require(size % 8 == 0 and size <= 256, f"heads of {size}")
    _require(k.shape == v.shape and k.shape[2] == size, f"{k.shape} {v.shape}")
    _require(heads % k.shape[1] == 0, f"{heads} heads in {k.shape[1]} groups")
    _require(all(other.shape == q.shape for other in others), "an output of another shape")
    for boundaries, rows, most in ((queries, len(q), most_queries), (keys, len(k), most_keys)):
        _require(boundaries.device == DEVICE and boundaries.dtype == torch.int32, "the borders")
        _require(boundaries.dim() == 1 and boundaries.is_contiguous(), "the borders")
        values = value_of(boundaries)
        _require(values is not None, "borders whose values the host never knew")
        _require(int(values[0]) == 0 and int(values[-1]) == rows, f"{values} for {rows} rows")
        _require(int(values.diff().max()) == most, f"{values}, said to be at most {most}")
    _require(len(queries) == len(keys), "as many documents of queries as of keys")


# ------------------------------------------------------------------ the process


def install() -> FakeGpu:
    """Make this process see one GPU; returns the mode, which stays on."""
    from megatron_epp.mcore.patching import cpu_host

    assert not torch.cuda.is_available(), "there is a GPU: run tests/gpu"
    cpu_host._prepare_environment()
    cpu_host._replace_cuda_module()
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: True
    cuda._lazy_init = lambda: None
    cuda.current_device = lambda: 0
    none = {"all": dict.fromkeys(("current", "peak", "allocated", "freed"), 0)}
    cuda.memory_stats_as_nested_dict = lambda device=None: {"active_bytes": none}
    generator = torch.Generator()  # apart from the host's, as on a GPU
    cuda.default_generators = (generator,)
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda device=None: generator.get_state()
        module.set_rng_state = lambda state, device=None: generator.set_state(state)
        module.manual_seed = module.manual_seed_all = lambda seed: generator.manual_seed(seed)
    fake_tensor.init_gpu_context = lambda device: None
    tensor: Any = Tensor
    tensor.cuda = lambda self, device=None, *args, **others: self.to(DEVICE)
    tensor.pin_memory = _pin
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]
    FakeTensor.data_ptr = _address
    # Python's questions; what C++ is told instead, __torch_dispatch__ says.
    FakeTensor.is_cuda = property(lambda self: self.device.type == "cuda")
    FakeTensor.is_meta = property(lambda self: False)
    mode = FakeGpu()
    mode.__enter__()
    return mode


def _pin(tensor: Tensor, *args: Any) -> Tensor:
    if tensor.device.type != "cpu":
        raise DeviceError(f"a tensor on {tensor.device} is pinned")
    pinned = tensor.clone()
    _pinned[pinned] = True
    return pinned


def _address(tensor: FakeTensor) -> int:
    """Of its first element; torch's own answer is 0 for all, which would make them one."""
    where = tensor.untyped_storage()._cdata << 40
    return where + tensor.storage_offset() * tensor.element_size()


def _apply(module: torch.nn.Module, move: Any, recurse: bool = True) -> torch.nn.Module:
    """``Module._apply`` for parameters whose type changes with their place: a new one then."""
    for child in module.children():
        _apply(child, move)
    for tensors in (module._parameters, module._buffers):
        for name, old in tensors.items():
            if old is None:
                continue
            with torch.no_grad():
                moved = move(old)
            if moved is old:
                continue
            if isinstance(old, FakeTensor):
                old.data = moved
            elif tensors is module._buffers:
                tensors[name] = moved
            else:
                tensors[name] = torch.nn.Parameter(moved, old.requires_grad)
                vars(tensors[name]).update(vars(old))
    return module
