"""Common parts of the scripts that run frameworks' own code.

They are the choice of a checkout, mocks for the rest of a framework, two stages in separate
processes, and the comparison of results.
"""

import argparse
import math
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from random import Random
from typing import Any, ClassVar
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

TOLERANCES = {"float64": 1e-12, "float32": 1e-6}  # by the dtype of the model


class Anything(types.ModuleType):
    """Module in which every attribute is a mock."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = MagicMock(name=name)
        setattr(self, name, made)
        return made


class _Mocks(MetaPathFinder, Loader):
    def __init__(self, packages: Sequence[str]):
        self.packages = packages

    def find_spec(self, name: str, *where: Any) -> ModuleSpec | None:
        mocked = any(name == one or name.startswith(f"{one}.") for one in self.packages)
        return ModuleSpec(name, self, is_package=True) if mocked else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing, because a mock has no code."""


def mock(*packages: str) -> None:
    """Replace ``packages`` and all modules below them by mocks in later imports."""
    sys.meta_path.insert(0, _Mocks(packages))


def sources_of(framework: str, checkout: Path | None) -> tuple[Path, str]:
    """Return the folder of the packages of ``framework``, and its name and version as text.

    The sources are those of ``checkout``, or else of the installed distribution.

    Raises:
        ValueError: if there are no sources.
    """
    if checkout is not None:
        inside = checkout / "src"
        return (inside if inside.is_dir() else checkout).resolve(), f"{framework} of {checkout}"
    try:
        distribution = metadata.distribution(framework)  # pip's names are the frameworks' own
    except metadata.PackageNotFoundError:
        raise ValueError(
            f"{framework}: pip has installed none in {sys.prefix}; install it there, or name a "
            "checkout"
        ) from None
    return Path(str(distribution.locate_file(""))), f"{framework} {distribution.version}"


def run_stages(
    doc: str,
    framework: str,
    file: str,
    work: Callable[..., None],
    shares_rows: bool = False,
    shares_experts: bool = False,
) -> int:
    """Start ``work`` on all ranks, and return the exit status.

    Its arguments are the rank, the rendezvous file, the folder of ``framework`` that contains
    ``file`` (from the command line, or as installed), and the dtype. With ``shares_rows``, also the
    number of context-parallel ranks of a stage, and with ``shares_experts`` the number of replicas
    that share experts, which the command line names.
    """
    import rl_loop
    import torch

    flag = f"--{framework.lower()}"
    parser = argparse.ArgumentParser(description=doc.split("\n\n")[0])
    otherwise = "without, what pip has installed here"
    parser.add_argument(
        flag, type=Path, dest="checkout", help=f"a checkout of {framework}; {otherwise}"
    )
    parser.add_argument("--dtype", choices=TOLERANCES, default="float64", help="of the model")
    if shares_rows:
        parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks of a stage")
    if shares_experts:
        parser.add_argument(
            "--ep", type=int, default=1, help="replicas over which four experts of a layer lie"
        )
    chosen = parser.parse_args()
    shares = (chosen.cp,) if shares_rows else ()
    shares += (chosen.ep,) if shares_experts else ()
    try:
        sources, named = sources_of(framework, chosen.checkout)
        if not (sources / file).exists():
            raise ValueError(f"{flag} {sources}: holds no {file}")
    except ValueError as refusal:
        print(f"{parser.prog}: error: {refusal}", file=sys.stderr)
        return 2
    print(named, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        ranks = math.prod((rl_loop.STAGES, *shares))
        words = (meeting, sources, chosen.dtype, *shares)
        torch.multiprocessing.spawn(work, words, nprocs=ranks)
    return 0


@contextmanager
def stage_of(
    rank: int, meeting: str, load: Callable[[], Any], dtype: str, cp: int = 1, ep: int = 1
) -> Iterator[tuple[Any, Any]]:
    """Make this process a rank of a pipeline with ``cp`` ranks per stage; yield (loaded, model).

    ``loaded`` is the result of ``load``, called after Megatron is initialised; the model has dtype
    ``dtype``. With ``ep`` replicas, each layer has four experts, spread over the replicas.
    """
    import rl_loop
    import torch
    import torch.distributed as dist

    import megatron_epp

    megatron_epp.prepare_host()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_epp.mcore.patching.cpu_host import double_precision

    torch.set_num_threads(1)
    ranks = rl_loop.STAGES * cp * ep
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=rl_loop.STAGES,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,
    )
    experts = {"num_moe_experts": 4, "moe_router_load_balancing_type": "none"} if ep > 1 else {}
    loaded = load()
    with double_precision() if dtype == "float64" else nullcontext():
        model_parallel_cuda_manual_seed(1)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        model = rl_loop.build_model(stage, expert_model_parallel_size=ep, **experts)
        if dtype != "float64":
            model.to(getattr(torch, dtype))
            model.config.params_dtype = model.config.pipeline_dtype = getattr(torch, dtype)
        model.config.context_parallel_size = cp  # local attention refuses to be built for more
        yield loaded, model


def of_replica(number: int) -> int:
    """Return the number of this replica's batch ``number``, another one on every replica."""
    from megatron.core import parallel_state

    return number + 100 * parallel_state.get_data_parallel_rank()


def gradients_of(model: Any, field: str = "grad") -> dict[str, Any]:
    """Return ``field`` of each weight that has one, summed over context-parallel ranks."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    held = ((name, getattr(p, field)) for name, p in model.named_parameters())
    found = {name: one.clone() for name, one in held if one is not None}
    for one in found.values():
        dist.all_reduce(one, group=parallel_state.get_context_parallel_group())
    return found


class GradientKeeper:
    """Substitute for an optimizer: stores each step's gradients (``field``), without an update."""

    def __init__(self, model: Any, field: str):
        self.model, self.field = model, field
        self.gradients: list[dict[str, Any]] = []

    def zero_grad(self) -> None: ...

    def step(self) -> tuple[bool, float, int]:
        self.gradients.append(gradients_of(self.model, self.field))
        return True, 1.0, 0


def attention(
    plain: Callable[..., Any],
    query: Any,
    key: Any,
    value: Any,
    *any: Any,
    packed_seq_params: Any = None,
    **others: Any,
) -> Any:
    """Compute attention within packed documents [T, heads, D].

    Megatron's own function ``plain`` requires a GPU for packed documents; it computes the padded
    samples.
    """
    import torch

    if packed_seq_params is None:
        return plain(query, key, value, *any, **others)
    boundaries = packed_seq_params.cu_seqlens_q
    place = torch.arange(len(query))
    document = torch.bucketize(place, boundaries[1:], right=True)
    mask = (place[:, None] >= place) & (document[:, None] == document)
    q, k, v = (one.transpose(0, 1)[None] for one in (query, key, value))
    made = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    return made[0].transpose(0, 1).flatten(1)


def attend_within_documents(model: Any) -> None:
    from gathered_attention import attend_over_ranks

    if model.config.context_parallel_size > 1:
        attend_over_ranks(model)
        return
    for layer in model.decoder.layers:
        core = layer.self_attention.core_attention
        core.forward = partial(attention, core.forward)


def compare(
    rank: int, train: Callable[[], Sequence[Mapping[str, Any]]], slice_it: Callable[[], Any]
) -> None:
    """Compare the tensors of ``train`` in Megatron's schedule and in slices with random plans.

    ``train`` returns the tensors of each of its calls of the schedule; ``slice_it`` attaches the
    model. All stages must call this function.

    Raises:
        SystemExit: if tensors differ.
    """
    import torch
    import torch.distributed as dist

    expected = train()
    ran: list[Any] = []
    _install_drawn_slices(ran)
    slice_it()
    errors = _differences(train(), expected)
    assert len(ran) == len(expected), f"{len(ran)} of {len(expected)} calls came in slices"
    spans = [[one for chunk in done.plan.chunks for one in chunk.spans] for done in ran]
    cut = sum(any(one.start > 0 for one in of_call) for of_call in spans)
    order = " ".join(map(str, ran[-1].plan.orders[ran[-1].records[0].stage]))
    print(
        f"rank {rank}: in slices ({cut} of {len(ran)} calls cut documents): {len(errors)} tensors, "
        f"worst difference {torch.tensor(errors).max():.1e}; ran {order}",
        flush=True,
    )
    assert cut, "no document was cut"
    tolerance = TOLERANCES[str(next(iter(expected[0].values())).dtype).removeprefix("torch.")]
    dist.barrier()
    if not all(error <= tolerance for error in errors):  # also if one is no number
        raise SystemExit(f"rank {rank}: NOT equal (to {tolerance:g})")


def _install_drawn_slices(ran: list[Any]) -> None:
    """Install this project's schedule with random valid plans for slices."""
    from megatron_epp.ir import FULL, KEEP
    from megatron_epp.mcore.loops.install import Installation
    from megatron_epp.mcore.loops.settings import Settings
    from tests.certify.loops.micro_batches import arbitrary_sliced_plans

    def draw(calls: Any, layers: Any, rates: Any, options: Any, forward_only: bool) -> Any:
        random = Random(len(ran))  # alike on every rank
        return arbitrary_sliced_plans(
            calls, layers, random, options.split, forward_only, KEEP + FULL
        )

    Installation(Settings(observe=ran.append, make_plans=draw))


def _differences(
    ours: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]
) -> list[float]:
    """Return the largest difference of each tensor, relative to its largest element."""
    return [
        float((made[name] - wanted[name]).abs().max() / wanted[name].abs().max().clamp(min=1e-30))
        for made, wanted in zip(ours, expected, strict=True)
        for name in wanted
        if wanted[name].numel()  # of a sample a rank may have no token of the answer
    ]
