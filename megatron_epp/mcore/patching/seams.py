"""The list of places where Megatron is touched, with the reason for each.

A seam replaces one attribute of one module or class while the program runs. The replacement was
written against the source that a release of the table has there (releases.py); when the source is
another one, ``check_seams`` stops the start and says which seam drifted, instead of letting a patch
meet code that it was not made for.

A Megatron-LM checkout that has the patches of ``patches/`` applied carries a marker in each patched
function. Such a seam counts as in place and is left alone; the schedule is then registered instead.
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
from megatron_epp.mcore.patching.releases import NEWEST, STABLE, release_of

_MARK = "__megatron_epp_seam__"

When = Literal["always", "cpu host", "epp"]


@dataclass(frozen=True, slots=True)
class Seam:
    """One attribute of Megatron that is replaced.

    ``replacement`` is given the original and returns what takes its place. ``relies_on`` names
    functions that stay as they are but whose way of using the target the replacement counts on;
    they are part of the fingerprint, which is known for every release (releases.py).
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


def check_seams(seams: Sequence[Seam] | None = None) -> None:
    """Refuse a Megatron other than those that the seams were made for.

    ValueError: the version of megatron-core is none of the table's (releases.py), or the source at
    a seam differs from that release's.
    """
    import megatron.core

    version = megatron.core.__version__
    release = release_of(version)
    if release is None:
        raise ValueError(
            f"megatron-core {version} is installed; megatron_epp is made for the internals of "
            f"{STABLE}: pip install megatron-core=={NEWEST}"
        )
    for seam in ALL_SEAMS if seams is None else seams:
        if is_patched(seam):
            continue
        found, known = fingerprint_of(seam), release.fingerprints.get(seam.name)
        if found != known:
            raise ValueError(
                f"seam '{seam.name}': the source of {' or '.join((seam.target, *seam.relies_on))} "
                f"is not that of megatron-core {release} (fingerprint {found}, expected "
                f"{known}): undo the local change or reinstall it, pip install --force-reinstall "
                f"--no-deps megatron-core=={NEWEST}; scripts/upstream/check_upstream.py shows "
                "a checkout's difference"
            )


def install(seams: Sequence[Seam]) -> None:
    """Check the seams and put their replacements in place. What is in place already is left alone.

    ValueError: as ``check_seams``.
    """
    check_seams(seams)
    for seam in seams:
        owner, attribute = _find(seam.target)
        if is_patched(seam) or hasattr(getattr(owner, attribute), _MARK):
            continue
        original = getattr(owner, attribute)
        replacement = seam.replacement(original)
        setattr(replacement, _MARK, original)
        setattr(owner, attribute, replacement)


def remove(seams: Sequence[Seam]) -> None:
    """Put the originals back; a seam that is not in place is left alone."""
    for seam in seams:
        owner, attribute = _find(seam.target)
        original = getattr(getattr(owner, attribute), _MARK, None)
        if original is not None:
            setattr(owner, attribute, original)


def is_installed(seam: Seam) -> bool:
    """Whether the seam's replacement stands at its target, or a patch does its work."""
    owner, attribute = _find(seam.target)
    return hasattr(getattr(owner, attribute), _MARK) or is_patched(seam)


def is_patched(seam: Seam, source: Callable[[str], str] | None = None) -> bool:
    """Whether the target's source says that the patch of this seam was applied (patches/)."""
    return f"megatron_epp patch: {seam.name}" in (source or _source)(seam.target)


def fingerprint_of(seam: Seam, source: Callable[[str], str] | None = None) -> str:
    """Sixteen hexadecimal digits over the sources of the target and of what the seam relies on.

    ``source`` gives that of a dotted name; the running program's, where none is given.
    """
    read = source or _source
    text = "\n".join(read(name) for name in (seam.target, *seam.relies_on))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _source(dotted: str) -> str:
    """The source of a function, ours set aside, with what is only layout taken off."""
    owner, attribute = _find(dotted)
    found = getattr(owner, attribute)
    original = getattr(found, _MARK, found)
    try:
        return without_layout(inspect.getsource(original))
    except (OSError, TypeError):
        return ""


def without_layout(source: str) -> str:
    """``source`` without blanks at the ends of its lines and blank lines around it."""
    return "\n".join(line.rstrip() for line in source.strip().splitlines())


def _find(dotted: str) -> tuple[Any, str]:
    """The object that holds the last name of ``dotted``, and that name."""
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
    raise ValueError(f"seam target {dotted} does not exist: megatron-core {STABLE} was expected")


# ------------------------------------------------------------------ the list


def _seam(
    name: str, target: str, when: When, reason: str, *relies_on: str
) -> Callable[[Callable[..., Any]], Seam]:
    """The seam whose target then calls the decorated function, with the original in front of what
    the target is called with."""

    def seam(body: Callable[..., Any]) -> Seam:
        def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def replaced(*args: Any, **kwargs: Any) -> Any:
                return body(original, *args, **kwargs)

            return replaced

        return Seam(name, target, when, reason, replacement, relies_on)

    return seam


@_seam(
    "index builder",
    "megatron.core.datasets.utils.compile_helpers",
    "always",
    "it runs make, and exits on failure; the wheel has the built library but no Makefile",
    "megatron.training.initialize._compile_dependencies",
)
def INDEX_BUILDER(original: Callable[[], None]) -> None:
    try:
        import megatron.core.datasets.helpers_cpp  # noqa: F401
    except ImportError:
        original()


_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer."


def _torch_steps(optimizer: Any) -> bool:
    """Whether the distributed optimizer ``optimizer`` wraps torch's Adam, which counts steps per
    parameter.
    """
    from megatron.core.optimizer import distrib_optimizer

    return (
        not distrib_optimizer.HAVE_APEX_OR_TE
        and not optimizer.is_stub_optimizer
        and not optimizer.ddp_config.use_megatron_fsdp
    )


@_seam(
    "resumed optimizer, state",
    f"{_OPTIMIZER}state_dict",
    "always",
    "with torch's Adam it asserts a step, which an optimizer about to be loaded has not",
)
def OPTIMIZER_STATE(original: Callable[..., Any], self: Any) -> Any:
    if not _torch_steps(self) or any("step" in state for state in self.optimizer.state.values()):
        return original(self)
    # The original reads the step off the parameters' states, of which there are none before the
    # first step: when the template is built that a checkpoint is loaded into. One entry that
    # belongs to no parameter answers it.
    self.optimizer.state["no step yet"] = {"step": torch.tensor(0.0)}
    try:
        return original(self)
    finally:
        del self.optimizer.state["no step yet"]


@_seam(
    "resumed optimizer, load",
    f"{_OPTIMIZER}load_state_dict",
    "always",
    "with torch's Adam the steps of all parameters become one tensor, which runs ahead",
)
def OPTIMIZER_LOAD(original: Callable[..., Any], self: Any, state_dict: Any) -> None:
    original(self, state_dict)
    if not _torch_steps(self):
        return
    # The original gives all parameters one tensor as their step, and torch's Adam adds one to
    # it in place for each parameter: with n parameters every iteration would count as n.
    for state in self.optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"].detach().clone()


@_seam(
    "resumed optimizer, shard",
    f"{_OPTIMIZER}_set_main_param_and_optimizer_states",
    "always",
    "with torch's Adam it sets the step back to 0; in float32 it fails under autograd",
)
def OPTIMIZER_SHARD(
    original: Callable[..., None], self: Any, model_param: Any, tensors: dict[str, Any]
) -> None:
    # load_state_dict has set the step from the parameter groups; what comes with the shard is
    # the template's step of 0, or nothing at all. A value that is no tensor is passed over.
    if _torch_steps(self):
        tensors = {**tensors, "step": None}
    # In float32 the shard is a view of the model's own parameter, a leaf of autograd, which
    # nobody may write to while operations are recorded.
    with torch.no_grad():
        original(self, model_param, tensors)


@_seam(
    "no CUDA assertion",
    "megatron.training.training.initialize_megatron",
    "cpu host",
    "pretrain() cannot pass allow_no_cuda, and is_available() stays False (cpu_host.py)",
    "megatron.training.training.pretrain",
)
def NO_CUDA_ASSERTION(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **{**kwargs, "allow_no_cuda": True})


@_seam(
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
    torch.set_rng_state(new_state)


@_seam(
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
    centred = config.layernorm_zero_centered_gamma
    plain = copy.copy(config)
    plain.sequence_parallel = plain.layernorm_zero_centered_gamma = False
    norm = original(cls, plain, *args, **kwargs)
    if centred:
        norm = ZERO_CENTERED[type(norm)](norm.normalized_shape, eps=norm.eps)
    # Each rank normalises its own part of the tokens, so finalize_model_grads must add up the
    # weights' gradients over the tensor-parallel group; this attribute is how it finds them.
    for parameter in norm.parameters() if config.sequence_parallel else ():
        parameter.sequence_parallel = True
    return norm


@_seam(
    "expert exchange",
    "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
    "cpu host",
    "split sizes become lists only if on a GPU, and all-to-all takes no tensor",
)
def EXPERT_EXCHANGE(
    original: Callable[..., Any], tensor: Any, as_numpy: bool = False, record_stream: bool = False
) -> Any:
    if torch.is_tensor(tensor) and as_numpy:
        return tensor.cpu().numpy()
    return original(tensor, as_numpy, record_stream)


@_seam(
    "layers of depths",
    "megatron.training.models.gpt.mtp_block_spec",
    "cpu host",
    "it describes layers that predict further tokens anew, and not as the model's others",
)
def MTP_LAYERS(original: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
    made = original(config, *args, **kwargs)
    # Set where the model's other layers are mended (mcore/model/layer_spec.py).
    mend = getattr(config, "epp_mend_depths", None)
    return made if mend is None else mend(made)


@_seam(
    "fusion warm-up",
    "megatron.training.initialize._warmup_jit_function",
    "epp",
    "it allocates activations of --seq-length tokens, which no chunk need ever reach",
    "megatron.training.initialize.set_jit_fusion_options",
)
def FUSION_WARM_UP(original: Callable[..., None], tp_size: int | None = None) -> None:
    pass


def _multiply_as_told(
    original: Callable[..., Any], self: Any, input: Any, weight: Any, *args: Any, **kwargs: Any
) -> Any:
    # Set for one iteration, and only where its plan splits backwards
    # (mcore/model/split_backward.py).
    multiply = getattr(self, "epp_multiply", None)
    if multiply is not None:
        output = multiply(input, weight, *args, **kwargs)
        if output is not NotImplemented:
            return output
    return original(self, input, weight, *args, **kwargs)


_LINEARS = "megatron.core.tensor_parallel.layers."
COLUMN_LINEAR = _seam(
    "column linear",
    f"{_LINEARS}ColumnParallelLinear._forward_impl",
    "epp",
    "its own deferred weight gradients do nothing (backward_dw is pass): W needs its inputs",
    f"{_LINEARS}ColumnParallelLinear.forward",
)(_multiply_as_told)
ROW_LINEAR = _seam(
    "row linear",
    f"{_LINEARS}RowParallelLinear._forward_impl",
    "epp",
    "as the column linear's",
    f"{_LINEARS}RowParallelLinear.forward",
)(_multiply_as_told)


def schedule_seam(factory: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Seam:
    """The seam through which Megatron's trainer and its evaluation find their schedule.

    ``factory`` is given the original ``get_forward_backward_func(pp_size=None, vp_size=None,
    schedule_pg_collection=None)`` and returns the function that takes its place.
    """
    return Seam(
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


def apply_schedule_seam(factory: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Make Megatron's trainer and its evaluation use the schedule that ``factory`` makes; see
    ``schedule_seam``.

    A second call with another factory starts again from Megatron's original. ValueError: as
    ``check_seams``.
    """
    seam = schedule_seam(factory)
    if is_patched(seam):
        from megatron.core.pipeline_parallel import schedules

        check_seams([])  # the version
        schedules.choose_schedule(factory)
        return
    remove([seam])
    install([seam])


ALWAYS_SEAMS = (INDEX_BUILDER, OPTIMIZER_STATE, OPTIMIZER_LOAD, OPTIMIZER_SHARD)
CPU_HOST_SEAMS = (
    NO_CUDA_ASSERTION, RANDOM_STATE, SEQUENCE_PARALLEL_NORM, EXPERT_EXCHANGE, MTP_LAYERS,
)  # fmt: skip
EPP_SEAMS = (FUSION_WARM_UP, COLUMN_LINEAR, ROW_LINEAR)
ALL_SEAMS = (*ALWAYS_SEAMS, *CPU_HOST_SEAMS, *EPP_SEAMS, schedule_seam(lambda original: original))
