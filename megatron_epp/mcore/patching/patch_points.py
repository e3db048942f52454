"""List of the places where Megatron is patched, with the reason for each.

A patch point replaces one attribute of one module or class while the program runs. The replacement
is written for the source in known releases (releases.py). If the installed source differs,
``check_patch_points`` raises an error that names the patch point, so a patch is only applied to the
code for which it was written.

In a Megatron-LM checkout with the patches of ``patches/``, each patched function contains a marker.
A patch point whose target contains the marker counts as installed and is not replaced. The patched
Megatron then offers functions to register the schedule and the micro-batch calculator.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron_epp.layers.norms import ZERO_CENTERED
from megatron_epp.mcore.patching.releases import LOOP_RELEASES, NEWEST, STABLE, release_of
from megatron_epp.mcore.patching.uneven_batches import build_calculator

_MARK = "__megatron_epp_seam__"

When = Literal["always", "cpu host", "epp"]


@dataclass(frozen=True, slots=True)
class PatchPoint:
    """One attribute of Megatron that is replaced.

    ``target`` is the dotted name of the attribute, and ``when`` says in which jobs it is replaced.
    ``replacement`` is a function from the original to its replacement. ``relies_on`` names
    functions that use the target and are not replaced; the replacement depends on how they use it.
    The fingerprint covers the sources of target and ``relies_on``; releases.py lists it for every
    release.
    """

    name: str
    target: str
    when: When
    reason: str
    replacement: Callable[[Any], Any]
    relies_on: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} ({self.target})"


# ------------------------------------------------------------------ checking and installing


def check_patch_points(patch_points: Sequence[PatchPoint] | None = None) -> None:
    """Check that the installed Megatron has the source that the patch points are written for.

    By default, the function checks all patch points.

    Raises:
        ValueError: The version of megatron-core is unknown (releases.py), or the source at a patch
            point differs from that release's.
    """
    import megatron.core

    version = megatron.core.__version__
    release = release_of(version)
    if release is None and patch_points is not None:
        release = release_of(version, LOOP_RELEASES)
    if release is None:
        raise ValueError(
            f"megatron-core {version} is installed; megatron_epp is made for the internals of "
            f"{STABLE}: pip install megatron-core=={NEWEST}"
        )
    for patch_point in ALL_PATCH_POINTS if patch_points is None else patch_points:
        if is_patched(patch_point):
            continue
        actual, known = fingerprint_of(patch_point), release.fingerprints.get(patch_point.name)
        if actual != known:
            raise ValueError(
                f"patch point '{patch_point.name}': the source of "
                f"{' or '.join((patch_point.target, *patch_point.relies_on))} "
                f"is not that of megatron-core {release} (fingerprint {actual}, expected "
                f"{known}): undo the local change or reinstall it, pip install --force-reinstall "
                f"--no-deps megatron-core=={NEWEST}; scripts/upstream/check_upstream.py shows "
                "a checkout's difference"
            )


def install(patch_points: Sequence[PatchPoint]) -> None:
    """Check the patch points, and install the replacements that are not yet installed.

    Raises:
        ValueError: See ``check_patch_points``.
    """
    check_patch_points(patch_points)
    for patch_point in patch_points:
        owner, attribute = _find(patch_point.target)
        if is_patched(patch_point) or hasattr(getattr(owner, attribute), _MARK):
            continue
        original = getattr(owner, attribute)
        replacement = patch_point.replacement(original)
        setattr(replacement, _MARK, original)
        setattr(owner, attribute, replacement)


def remove(patch_points: Sequence[PatchPoint]) -> None:
    """Restore the original of every installed patch point."""
    for patch_point in patch_points:
        owner, attribute = _find(patch_point.target)
        original = getattr(getattr(owner, attribute), _MARK, None)
        if original is not None:
            setattr(owner, attribute, original)


def is_installed(patch_point: PatchPoint) -> bool:
    """Return whether the target is replaced at run time, or patched in the source."""
    owner, attribute = _find(patch_point.target)
    return hasattr(getattr(owner, attribute), _MARK) or is_patched(patch_point)


def is_patched(patch_point: PatchPoint, source: Callable[[str], str] | None = None) -> bool:
    """Return whether the target's source contains the marker of this patch (patches/).

    ``source`` maps a dotted name to source code; by default, it reads the code of the function in
    this process.
    """
    return f"megatron_epp patch: {patch_point.name}" in (source or _source)(patch_point.target)


def fingerprint_of(patch_point: PatchPoint, source: Callable[[str], str] | None = None) -> str:
    """Return sixteen hexadecimal digits: a hash of the sources of the target and ``relies_on``.

    ``source`` maps a dotted name to source code; by default, it reads the code of the function in
    this process.
    """
    read = source or _source
    text = "\n".join(read(name) for name in (patch_point.target, *patch_point.relies_on))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _source(dotted: str) -> str:
    """Return the original function's source (:func:`without_layout`); "" if it has no source."""
    owner, attribute = _find(dotted)
    function = getattr(owner, attribute)
    original = getattr(function, _MARK, function)
    try:
        return without_layout(inspect.getsource(original))
    except (OSError, TypeError):
        return ""


def without_layout(source: str) -> str:
    """Return ``source`` without trailing blanks, and without leading and trailing blank lines."""
    return "\n".join(line.rstrip() for line in source.strip().splitlines())


def _find(dotted: str) -> tuple[Any, str]:
    """Return the module or class that contains the last name of ``dotted``, and that name."""
    *path, attribute = dotted.split(".")
    for length in range(len(path), 0, -1):
        try:
            owner = importlib.import_module(".".join(path[:length]))
        except ModuleNotFoundError as error:
            if error.name is None or not ".".join(path).startswith(error.name):
                raise
            continue
        try:
            for name in path[length:]:
                owner = getattr(owner, name)
            getattr(owner, attribute)
        except AttributeError:
            break
        return owner, attribute
    raise ValueError(f"patch point {dotted} does not exist: megatron-core {STABLE} was expected")


# ------------------------------------------------------------------ the list


def _patch_point(
    name: str, target: str, when: When, reason: str, *relies_on: str
) -> Callable[[Callable[..., Any]], PatchPoint]:
    """Return a decorator that turns the decorated function into a patch point.

    The replaced target calls the decorated function with the original as first argument, followed
    by the call's arguments.
    """

    def patch_point(body: Callable[..., Any]) -> PatchPoint:
        def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def replaced(*args: Any, **kwargs: Any) -> Any:
                return body(original, *args, **kwargs)

            return replaced

        return PatchPoint(name, target, when, reason, replacement, relies_on)

    return patch_point


@_patch_point(
    "index builder",
    "megatron.core.datasets.utils.compile_helpers",
    "always",
    "it runs make, and exits on failure; the wheel has the built library but no Makefile",
    "megatron.training.initialize._compile_dependencies",
)
def INDEX_BUILDER(original: Callable[[], None]) -> None:
    """Build the index helpers only if they cannot be imported."""
    try:
        import megatron.core.datasets.helpers_cpp  # noqa: F401
    except ImportError:
        original()


_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer."


def _torch_steps(optimizer: Any) -> bool:
    """Return whether ``optimizer`` wraps torch's Adam, which counts steps per parameter."""
    from megatron.core.optimizer import distrib_optimizer

    return (
        not distrib_optimizer.HAVE_APEX_OR_TE
        and not optimizer.is_stub_optimizer
        and not optimizer.ddp_config.use_megatron_fsdp
    )


@_patch_point(
    "resumed optimizer, state",
    f"{_OPTIMIZER}state_dict",
    "always",
    "with torch's Adam it asserts a step, which an optimizer about to be loaded has not",
)
def OPTIMIZER_STATE(original: Callable[..., Any], self: Any) -> Any:
    """Return the optimizer's state; if no step was done, the state contains step 0."""
    if not _torch_steps(self) or any("step" in state for state in self.optimizer.state.values()):
        return original(self)
    # The original reads the step from the parameters' states. Before the first step there are no
    # states, but Megatron builds the template for loading a checkpoint then. This entry, which
    # belongs to no parameter, provides the step.
    self.optimizer.state["no step yet"] = {"step": torch.tensor(0.0)}
    try:
        return original(self)
    finally:
        del self.optimizer.state["no step yet"]


@_patch_point(
    "resumed optimizer, load",
    f"{_OPTIMIZER}load_state_dict",
    "always",
    "with torch's Adam the steps of all parameters become one tensor, which runs ahead",
)
def OPTIMIZER_LOAD(original: Callable[..., Any], self: Any, state_dict: Any) -> None:
    """Load the state, and give each parameter its own step tensor."""
    original(self, state_dict)
    if not _torch_steps(self):
        return
    # The original gives all parameters one common step tensor. Torch's Adam increments it in place
    # for each parameter, so with n parameters an iteration would count as n steps.
    for state in self.optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"].detach().clone()


@_patch_point(
    "resumed optimizer, shard",
    f"{_OPTIMIZER}_set_main_param_and_optimizer_states",
    "always",
    "with torch's Adam it sets the step back to 0; in float32 it fails under autograd",
)
def OPTIMIZER_SHARD(
    original: Callable[..., None], self: Any, model_param: Any, tensors: dict[str, Any]
) -> None:
    """Set a main parameter and its optimizer states, except Adam's step, without autograd."""
    # load_state_dict has set the step from the parameter groups. The shard contains the template's
    # step of 0, or none. The original ignores a value that is not a tensor.
    if _torch_steps(self):
        tensors = {**tensors, "step": None}
    # In float32 the shard is a view of the model's own parameter, a leaf of autograd. Autograd
    # forbids in-place writes to leaves while it records.
    with torch.no_grad():
        original(self, model_param, tensors)


def _before_load(original: Callable[..., None], self: Any, state_dict: Any) -> None:
    before = getattr(type(self), _BEFORE_LOAD, None)
    if before is not None:
        before(self, state_dict)
    original(self, state_dict)


_BEFORE_LOAD = "before_load"  # attribute of Megatron's classes, a function (self, state_dict)
RATES = _patch_point(
    "resumed rates",
    "megatron.core.optimizer.optimizer.ChainedOptimizer.load_state_dict",
    "always",
    "it finds saved groups by their rates, so it finds none with another --lr",
    "megatron.core.optimizer.optimizer.MegatronOptimizer._filter_and_reorder_param_groups",
)(_before_load)
SCHEDULE_STATE = _patch_point(
    "resumed schedule",
    "megatron.core.optimizer_param_scheduler.OptimizerParamScheduler.load_state_dict",
    "always",
    "it sets the next weight decay before it reads the saved one",
)(_before_load)


def call_before_load(patch_point: PatchPoint, before: Callable[[Any, Any], None]) -> None:
    """Make Megatron call ``before`` with an object and the state that it is about to load.

    Args:
        patch_point: :data:`RATES` or :data:`SCHEDULE_STATE`; it must be installed.
        before: Function of the object and its saved state, which may change both.
    """
    owner, _ = _find(patch_point.target)
    setattr(owner, _BEFORE_LOAD, before)


@_patch_point(
    "no CUDA assertion",
    "megatron.training.training.initialize_megatron",
    "cpu host",
    "pretrain() cannot pass allow_no_cuda, and is_available() stays False (cpu_host.py)",
    "megatron.training.training.pretrain",
)
def NO_CUDA_ASSERTION(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Initialise Megatron with ``allow_no_cuda``."""
    return original(*args, **{**kwargs, "allow_no_cuda": True})


@_patch_point(
    "random state",
    "megatron.core.tensor_parallel.random._set_cuda_rng_state",
    "cpu host",
    "it queues the change until CUDA is initialised, which never happens",
    "megatron.core.tensor_parallel.random.CudaRNGStatesTracker",
)
def RANDOM_STATE(
    original: Callable[..., None],
    new_state: torch.Tensor,
    device: int = -1,
    graph_safe: bool = False,
) -> None:
    """Set the CPU's random state immediately."""
    torch.set_rng_state(new_state)


@_patch_point(
    "sequence-parallel norm",
    "megatron.core.transformer.torch_norm.WrappedTorchNorm.__new__",
    "cpu host",
    "torch's norms are refused with sequence parallelism, but here there are no others; and have "
    "no zero-centred weights",
    "megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads",
)
def SEQUENCE_PARALLEL_NORM(
    original: Callable[..., Any], cls: type, config: Any, *args: Any, **kwargs: Any
) -> torch.nn.Module:
    """Return torch's norm, also with sequence parallelism and zero-centred weights."""
    centred = config.layernorm_zero_centered_gamma
    copied = copy.copy(config)
    copied.sequence_parallel = copied.layernorm_zero_centered_gamma = False
    norm = original(cls, copied, *args, **kwargs)
    if centred:
        norm = ZERO_CENTERED[type(norm)](norm.normalized_shape, eps=norm.eps)
    # Each rank normalises its own part of the tokens, so finalize_model_grads must sum the weights'
    # gradients over the tensor-parallel group. It finds these weights by this attribute.
    for parameter in norm.parameters() if config.sequence_parallel else ():
        parameter.sequence_parallel = True
    return norm


@_patch_point(
    "expert exchange",
    "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
    "cpu host",
    "split sizes become lists only if on a GPU, and all-to-all takes no tensor",
)
def EXPERT_EXCHANGE(
    original: Callable[..., Any], tensor: Any, as_numpy: bool = False, record_stream: bool = False
) -> Any:
    """Convert split sizes to a NumPy array, even if the tensor is on the CPU."""
    if torch.is_tensor(tensor) and as_numpy:
        return tensor.cpu().numpy()
    return original(tensor, as_numpy, record_stream)


@_patch_point(
    "layers of depths",
    "megatron.training.models.gpt.mtp_block_spec",
    "cpu host",
    "it describes MTP layers anew, and not as the model's others",
)
def MTP_LAYERS(original: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the spec of MTP layers, with the features added to the model's other layers."""
    spec = original(config, *args, **kwargs)
    # Set by the code that completes the specs of the model's other layers
    # (mcore/model/layer_spec.py).
    fix = getattr(config, "epp_fix_mtp", None)
    return spec if fix is None else fix(spec)


NO_FUSION_WARM_UP = "epp_no_fusion_warm_up"  # attribute of Megatron's args


@_patch_point(
    "fusion warm-up",
    "megatron.training.initialize._warmup_jit_function",
    "epp",
    "it allocates activations of --seq-length tokens, which no chunk need ever reach",
    "megatron.training.initialize.set_jit_fusion_options",
)
def FUSION_WARM_UP(original: Callable[..., None], tp_size: int | None = None) -> None:
    """Skip Megatron's warm-up of the JIT-fused kernels if its activations are large."""
    from megatron.training import get_args

    if not getattr(get_args(), NO_FUSION_WARM_UP, False):
        original(tp_size)


def _multiply_as_configured(
    original: Callable[..., Any], self: Any, input: Any, weight: Any, *args: Any, **kwargs: Any
) -> Any:
    # Set only during an iteration whose plan splits backwards (mcore/model/split_backward.py).
    multiply = getattr(self, "epp_multiply", None)
    if multiply is not None:
        output = multiply(input, weight, *args, **kwargs)
        if output is not NotImplemented:
            return output
    return original(self, input, weight, *args, **kwargs)


_LINEARS = "megatron.core.tensor_parallel.layers."
COLUMN_LINEAR = _patch_point(
    "column linear",
    f"{_LINEARS}ColumnParallelLinear._forward_impl",
    "epp",
    "its own deferred weight gradients do nothing (backward_dw is pass): W needs its inputs",
    f"{_LINEARS}ColumnParallelLinear.forward",
)(_multiply_as_configured)
ROW_LINEAR = _patch_point(
    "row linear",
    f"{_LINEARS}RowParallelLinear._forward_impl",
    "epp",
    "as the column linear's",
    f"{_LINEARS}RowParallelLinear.forward",
)(_multiply_as_configured)


MICRO_BATCHES = _patch_point(
    "micro-batches",
    "megatron.core.num_microbatches_calculator._build_num_microbatches_calculator",
    "epp",
    "it refuses batches that replicas do not divide; plans balance seconds, not counts",
    "megatron.core.num_microbatches_calculator.ConstantNumMicroBatchesCalculator",
    "megatron.core.num_microbatches_calculator.StepBatchsizeNumMicroBatchesCalculator",
)(build_calculator)


def allow_uneven_batches() -> None:
    """Make Megatron accept batch sizes that are not multiples of the number of replicas.

    Call it before Megatron builds its micro-batch calculator.

    Raises:
        ValueError: See ``check_patch_points``.
    """
    if not is_patched(MICRO_BATCHES):
        return install([MICRO_BATCHES])
    from megatron.core import num_microbatches_calculator

    check_patch_points([])  # checks the version
    num_microbatches_calculator.choose_builder(MICRO_BATCHES.replacement)


def schedule_patch_point(factory: Callable[[Callable[..., Any]], Callable[..., Any]]) -> PatchPoint:
    """Return the patch point of the schedule that Megatron's trainer and evaluation look up.

    ``factory`` is a function from the original ``get_forward_backward_func(pp_size=None,
    vp_size=None, schedule_pg_collection=None)`` to its replacement.
    """
    return PatchPoint(
        name="schedule",
        target="megatron.training.training.get_forward_backward_func",
        when="epp",
        reason="the trainer has no hook for its schedule; train() and evaluate() look up this name",
        replacement=factory,
        relies_on=(
            "megatron.training.training.train_step",
            "megatron.training.training.evaluate",
        ),
    )


def apply_schedule_patch(factory: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Make Megatron's trainer and its evaluation use the schedule that ``factory`` returns.

    See ``schedule_patch_point``. A second call passes Megatron's original, not the first
    replacement, to its factory.

    Raises:
        ValueError: See ``check_patch_points``.
    """
    patch_point = schedule_patch_point(factory)
    if is_patched(patch_point):
        from megatron.core.pipeline_parallel import schedules

        check_patch_points([])  # checks the version
        schedules.choose_schedule(factory)
        return
    remove([patch_point])
    install([patch_point])


def install_on_cpu_host() -> None:
    """Install the patch points that the installed Megatron needs on a CPU-only host.

    Raises:
        ValueError: See ``check_patch_points``.
    """
    import megatron.core

    of_loops = release_of(megatron.core.__version__, LOOP_RELEASES)
    known = CPU_HOST_PATCH_POINTS
    install([p for p in known if of_loops is None or p.name in of_loops.fingerprints])


ALWAYS_PATCH_POINTS = (
    INDEX_BUILDER, OPTIMIZER_STATE, OPTIMIZER_LOAD, OPTIMIZER_SHARD, RATES, SCHEDULE_STATE,
)  # fmt: skip
CPU_HOST_PATCH_POINTS = (
    NO_CUDA_ASSERTION, RANDOM_STATE, SEQUENCE_PARALLEL_NORM, EXPERT_EXCHANGE, MTP_LAYERS,
)  # fmt: skip
EPP_PATCH_POINTS = (FUSION_WARM_UP, COLUMN_LINEAR, ROW_LINEAR, MICRO_BATCHES)
ALL_PATCH_POINTS = (
    *ALWAYS_PATCH_POINTS,
    *CPU_HOST_PATCH_POINTS,
    *EPP_PATCH_POINTS,
    schedule_patch_point(lambda original: original),
)
