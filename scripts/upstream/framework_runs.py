"""Parts that the scripts which run frameworks' own code share: the checkout that is named, mocks in
the place of the rest of a framework, two stages in processes of their own, and their verdict."""

import argparse
import math
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    """A module in which everything is a mock."""

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
        """There is nothing to execute."""


def mock(*packages: str) -> None:
    """Let these and all modules below them be mocks, wherever they are imported from now on."""
    sys.meta_path.insert(0, _Mocks(packages))


def sources_of(framework: str, checkout: Path | None) -> tuple[Path, str]:
    """The folder in which the packages of ``framework`` lie, and what they are, in words: of a
    ``checkout`` of it, else what pip has installed. ValueError: nothing."""
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


def found_in(
    doc: str, known: Mapping[str, Callable[[Path], Iterable[str]]], installed: bool = False
) -> tuple[str, list[str]]:
    """The framework of the command line, in words, and what its function of ``known`` finds in its
    checkout, or where it is ``installed``. What cannot be used ends in one line and status 2."""
    parser = argparse.ArgumentParser(description=doc.split("\n\n")[0])
    parser.add_argument("--framework", required=True, help=", ".join(known))
    otherwise = "; without, what pip has installed here" if installed else ""
    parser.add_argument(
        "--checkout", required=not installed, type=Path, help=f"a checkout of it{otherwise}"
    )
    chosen = parser.parse_args()
    try:
        if chosen.framework not in known:
            expected = ", ".join(known)
            raise ValueError(f"--framework {chosen.framework}: expected one of {expected}")
        if installed:
            folder, framework = sources_of(chosen.framework, chosen.checkout)
        else:
            folder, framework = chosen.checkout.resolve(), chosen.framework
        return framework, list(known[chosen.framework](folder))
    except (ValueError, OSError) as refusal:
        print(f"{parser.prog}: error: {refusal}", file=sys.stderr)
        raise SystemExit(2) from refusal


def run_stages(
    doc: str,
    framework: str,
    file: str,
    work: Callable[..., None],
    shares_rows: bool = False,
) -> int:
    """Call ``work`` of every rank, the file at which they meet, the folder of ``framework``, which
    holds ``file`` (the command line's checkout, else where pip has installed it), and the dtype
    that it names; the exit status. ``shares_rows``: and of as many context-parallel ranks of a
    stage as it names."""
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
    chosen = parser.parse_args()
    shares = (chosen.cp,) if shares_rows else ()
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
    rank: int, meeting: str, load: Callable[[], Any], dtype: str, cp: int = 1
) -> Iterator[tuple[Any, Any]]:
    """Make this process ``rank`` of stages of ``cp`` ranks: what ``load`` gives once Megatron is
    up, and the model in ``dtype``."""
    import rl_loop
    import torch
    import torch.distributed as dist

    import megatron_epp

    megatron_epp.prepare_host()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_epp.mcore.patching.cpu_host import double_precision

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=rl_loop.STAGES * cp)
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=rl_loop.STAGES, context_parallel_size=cp
    )
    loaded = load()
    with double_precision() if dtype == "float64" else nullcontext():
        model_parallel_cuda_manual_seed(1)
        model = rl_loop.build_model(parallel_state.get_pipeline_model_parallel_rank())
        if dtype != "float64":
            model.to(getattr(torch, dtype))
            model.config.params_dtype = model.config.pipeline_dtype = getattr(torch, dtype)
        model.config.context_parallel_size = cp  # local attention refuses to be built for more
        yield loaded, model


def gradients_of(model: Any, field: str = "grad") -> dict[str, Any]:
    """The ``field`` of each weight that has one, summed over the ranks that share its rows."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    held = ((name, getattr(p, field)) for name, p in model.named_parameters())
    found = {name: one.clone() for name, one in held if one is not None}
    for one in found.values():
        dist.all_reduce(one, group=parallel_state.get_context_parallel_group())
    return found


class GradientKeeper:
    """In the place of an optimizer: keeps what a step hands over, the ``field`` of each weight that
    has one; moves nothing."""

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
    """Within documents one behind the other, [T, heads, D]: Megatron's, ``plain``, wants a GPU for
    it, and computes samples side by side without."""
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
    from megatron_epp.mcore.certify.loops.context import attend_over_ranks

    if model.config.context_parallel_size > 1:
        attend_over_ranks(model)
        return
    for layer in model.decoder.layers:
        core = layer.self_attention.core_attention
        core.forward = partial(attention, core.forward)


def compare(
    rank: int,
    train: Callable[[], Sequence[Mapping[str, Any]]],
    slice_it: Callable[[], Any] | None = None,
) -> None:
    """Call ``train``, which gives the tensors of each of its calls to the schedule, with Megatron's
    schedule and with ours; then, behind ``slice_it``, in slices, cut and ordered by plans that are
    drawn. For all stages to call; SystemExit: they differ."""
    import megatron_epp
    from megatron_epp.mcore.loops.pipelines import WITNESSED_CALLS

    expected = train()
    ran: list[Any] = []
    installation = megatron_epp.install_schedule(observe=ran.append)
    errors = _differences(train(), expected)
    # The first ones show that the framework's micro-batches are read rightly.
    planned = len(expected) - WITNESSED_CALLS
    assert len(ran) == planned, f"{len(ran)} of {len(expected)} calls came by ours, not {planned}"
    show_order(rank, errors, ran)
    if slice_it is not None:
        ran.clear()
        installation.remove()
        _install_drawn_slices(ran)
        slice_it()
        in_slices = _differences(train(), expected)
        assert len(ran) == len(expected), f"{len(ran)} of {len(expected)} calls came in slices"
        spans = [[one for chunk in done.plan.chunks for one in chunk.spans] for done in ran]
        cut = sum(any(one.start > 0 for one in of_call) for of_call in spans)
        show_order(rank, in_slices, ran, f"in slices ({cut} of {len(ran)} calls cut documents): ")
        assert cut, "no document was cut"
        errors += in_slices
    dtype = next(iter(expected[0].values())).dtype
    require_equal(rank, errors, TOLERANCES[str(dtype).removeprefix("torch.")])


def _install_drawn_slices(ran: list[Any]) -> None:
    """Our schedule, whose plans for slices are drawn: any that compute the right thing."""
    from megatron_epp.certify.loops.micro_batches import arbitrary_sliced_plan
    from megatron_epp.ir import FULL, KEEP
    from megatron_epp.mcore.loops.install import Installation
    from megatron_epp.mcore.loops.settings import Settings

    def draw(
        lengths: Any, layers: Any, rates: Any, options: Any, forward_only: bool, *trees: Any
    ) -> Any:
        random = Random(len(ran))  # alike on every rank
        return arbitrary_sliced_plan(
            lengths, layers, random, options.split, forward_only, KEEP + FULL, *trees
        )

    Installation(Settings(observe=ran.append, make_sliced_plan=draw))


def _differences(
    ours: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]
) -> list[float]:
    """Largest differences of each tensor, as shares of its largest entry."""
    return [
        float((made[name] - wanted[name]).abs().max() / wanted[name].abs().max())
        for made, wanted in zip(ours, expected, strict=True)
        for name in wanted
        if wanted[name].numel()  # of a sample a rank may have no token of the answer
    ]


def show_order(rank: int, errors: Sequence[float], ran: Sequence[Any], how: str = "") -> None:
    """How far a stage's gradients are, and the order of its last call."""
    import torch

    order = " ".join(map(str, ran[-1].plan.orders[ran[-1].records[0].stage]))
    worst = f"{len(errors)} tensors, worst difference {torch.tensor(errors).max():.1e}"
    print(f"rank {rank}: {how}{worst}; ran {order}", flush=True)


def require_equal(rank: int, errors: Sequence[float], tolerance: float) -> None:
    """SystemExit: one of them is above the ``tolerance``. For all stages to call."""
    import torch.distributed as dist

    dist.barrier()
    if not all(error <= tolerance for error in errors):  # one that is no number is none of them
        raise SystemExit(f"rank {rank}: NOT equal (to {tolerance:g})")
