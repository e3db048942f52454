"""A stage's gradients reduced while its backward runs, and its early head, on devices that put work
off: ``ModelStage`` over Megatron's own DDP, by random plans, each replica by another one.

    iteration 1   counts how often each gradient is reported, and reduces at the end
    iteration 2   reduces a bucket as soon as its gradients are complete; with the distributed
                  optimizer, weights come back while its first forwards run
"""

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    distributed_data_parallel,
    param_and_grad_buffer,
)

from megatron_epp.ir import Payload, Plan, lower_rank  # noqa: E402
from megatron_epp.ir.random_plan import arbitrary_plan  # noqa: E402
from megatron_epp.layers.lm_head import fused_loss  # noqa: E402
from megatron_epp.layers.wgrad.linear import Linear, deferred_linear  # noqa: E402
from megatron_epp.mcore.lm_head import fused_head  # noqa: E402
from megatron_epp.mcore.model import bucket_order  # noqa: E402
from megatron_epp.mcore.model import stage as model_stage  # noqa: E402
from megatron_epp.runtime import link  # noqa: E402
from megatron_epp.runtime.clock import CudaClock  # noqa: E402
from megatron_epp.runtime.executor import CurrentOp, Executor  # noqa: E402
from megatron_epp.runtime.kv_store import Store  # noqa: E402
from megatron_epp.runtime.memory_meter import NoMeter  # noqa: E402
from tests.device.fakes import Group, coalescing, run_on  # noqa: E402
from tests.device.memory import CUDA  # noqa: E402
from tests.device.pipeline import ROWS, WIDTH, drawn  # noqa: E402
from tests.device.queues import HALVES, HERE, ORDERS, Order, World, half_of  # noqa: E402

pytestmark = pytest.mark.everything

LAYERS, WORDS, RATE, BLOCK = 2, 5, 0.01, 5


@dataclass(frozen=True)
class Case:
    """``plans[iteration][replica]``. ``aligned``: only the first stage's hooks reduce, and the last
    stage's head is early; ``sharded``: by the distributed optimizer, of ``instances``."""

    plans: tuple[tuple[Plan, ...], ...]
    aligned: bool = False
    sharded: bool = False
    instances: int = 1
    seed: int = 0

    @property
    def replicas(self) -> int:
        return len(self.plans[0])

    @property
    def stages(self) -> int:
        return self.plans[0][0].stages


def drawn_case(seed: int, stages: int = 2, replicas: int = 2, **how: Any) -> Case:
    random = Random(f"reductions {seed}")
    plans = tuple(
        tuple(
            arbitrary_plan(
                [random.randint(1, 9) for _ in range(random.randint(1, 2))],
                (1,) * stages,
                random,
                # W is last in one replica, B in another.
                split_backward=(0.0, 1.0)[(replica + iteration) % 2],
                modes="k",
            )
            for replica in range(replicas)
        )
        for iteration in range(3)
    )
    return Case(plans, seed=seed, **how)


# ------------------------------------------------------------------ the model


class Layer(nn.Module):
    def __init__(self, stage: int, layer: int, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(drawn(1, stage, layer).to(device))
        self.scale = nn.Parameter(1 + drawn(4, stage, layer, rows=1)[0].to(device) / 4)

    def forward(self, x: Tensor, deferred: Any) -> Tensor:
        x = x * self.scale
        if deferred is None:
            return (x @ self.weight.t()).tanh()
        return deferred_linear(x, None, Linear(self.weight), deferred).tanh()


class OutputLayer(nn.Module):
    """As much of Megatron's as the early head asks for."""

    sequence_parallel, tp_group, output_size_per_partition = False, None, WORDS

    def __init__(self, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(drawn(2, rows=WORDS).to(device))

    def forward(self, hidden: Tensor, **others: Any) -> tuple[Tensor, None]:
        return hidden @ self.weight.t(), None


class Toy(nn.Module):
    def __init__(self, stage: int, last: bool, device: torch.device):
        super().__init__()
        self.layers = nn.ModuleList(Layer(stage, layer, device) for layer in range(LAYERS))
        if last:
            self.output_layer = OutputLayer(device)
        self.deferred: Any = None
        self.received: Tensor | None = None

    def set_input_tensor(self, tensors: Sequence[Tensor | None]) -> None:
        (self.received,) = tensors

    def forward(self, rows: Tensor | None, known_gradient: Tensor | None = None) -> Tensor:
        x = rows if self.received is None else self.received
        assert x is not None
        for layer in self.layers:
            x = layer(x, self.deferred)
        if not hasattr(self, "output_layer"):
            return x
        if known_gradient is None:
            return token_losses(None, self.output_layer(x)[0])
        return fused_head.FusedHead(known_gradient)(
            hidden_states=x,
            output_layer=self.output_layer,
            output_weight=None,
            labels=torch.zeros(1, len(x), device=x.device),
            runtime_gather_output=None,
            compute_language_model_loss=token_losses,
            scale_logits=lambda logits: logits,
            config=None,
        )


def token_losses(labels: Tensor | None, logits_t1V: Tensor) -> Tensor:
    """[1, t]"""
    return logits_t1V.square().sum(-1).transpose(0, 1) / 2


def rows_of(plan: Plan, chunk: int, replica: int) -> Tensor:
    rows = ROWS + plan.chunks[chunk].tokens
    return drawn(3, replica, chunk, rows, rows=rows)[:, None]


def mask_of(plan: Plan, chunk: int) -> Tensor:
    rows = ROWS + plan.chunks[chunk].tokens
    return (torch.arange(rows)[None] % 4 != chunk % 4).double()


# ------------------------------------------------------------------ a stage of it


@dataclass(frozen=True)
class Batch:
    rows: Tensor | None
    loss_mask: Tensor | None
    params: Any
    labels: Any = None
    known_gradient: Tensor | None = None


class Builder:
    def __init__(self, plan: Plan, stage: int, replica: int):
        self.plan, self.stage, self.replica, self.device = plan, stage, replica, CUDA

    def prepare(self, chunk: int) -> None: ...

    def batch(self, chunk: int, store: Store, training: bool) -> Batch:
        first, last = self.stage == 0, self.stage == self.plan.stages - 1
        rows = rows_of(self.plan, chunk, self.replica).to(CUDA) if first else None
        mask = mask_of(self.plan, chunk).to(CUDA) if last else None
        return Batch(rows, mask, SimpleNamespace(state=SimpleNamespace()))


def forward_step(batches: Iterator[Batch], model: Any) -> tuple[Tensor, Callable]:
    batch = next(batches)
    output = model(batch.rows, batch.known_gradient)

    def loss_of(losses: Tensor) -> tuple:
        assert batch.loss_mask is not None
        loss = (losses * batch.loss_mask).sum()
        return loss, batch.loss_mask.sum(), {"loss": loss.detach()}

    return output, loss_of


@dataclass(frozen=True)
class Parts:
    """Modules that take part, one of them perhaps with a line taken away."""

    stage: ModuleType = model_stage
    bucket_order: ModuleType = bucket_order
    fused_loss: ModuleType = fused_loss
    buffer: ModuleType = param_and_grad_buffer


def stage_of(parts: Parts) -> type:
    class ToyStage(parts.stage.ModelStage):
        """Its linears defer as Megatron's do, without Megatron's."""

        def __init__(self, *given: Any):
            super().__init__(*given)
            self._deferral = None

        @contextmanager
        def _deferring(self, chunk: int) -> Iterator[None]:
            self.model.module.deferred = self._deferred.get(chunk)
            yield
            self.model.module.deferred = None

    return ToyStage


def wrapped(case: Case, stage: int, replica: int) -> Any:
    """This rank's stage in Megatron's DDP."""
    ranks = range(stage, case.replicas * case.stages, case.stages)
    everyone = Group(f"dp {stage}", ranks, lazy=True)
    alone = Group("alone", [HERE.host.rank])
    count = case.replicas // case.instances
    first = replica // count * count
    intra = Group(f"intra {stage} {first}", ranks[first : first + count], lazy=True)
    inter = Group(f"inter {stage} {replica % count}", ranks[replica % count :: count], lazy=True)
    pipeline = range(replica * case.stages, (replica + 1) * case.stages)
    groups = SimpleNamespace(
        dp=everyone, dp_cp=everyone, intra_dp_cp=intra, expt_dp=alone, intra_expt_dp=alone,
        tp=alone, pp=Group("pp", pipeline), ep=alone, inter_dist_opt=inter, intra_dist_opt=intra,
    )  # fmt: skip
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=True,
        use_distributed_optimizer=case.sharded,
        overlap_param_gather=case.sharded,
        num_distributed_optimizer_instances=case.instances,
        bucket_size=40,
        check_for_nan_in_grad=False,
    )
    toy = Toy(stage, stage == case.stages - 1, CUDA)
    settings = SimpleNamespace(calculate_per_token_loss=True, context_parallel_size=1)
    return DistributedDataParallel(settings, config, toy, pg_collection=groups)


def step(model: Any, case: Case) -> None:
    """The optimizer's: of this rank's part of every bucket where it is sharded."""
    with torch.no_grad():
        if not case.sharded:
            for parameter in model.module.parameters():
                parameter -= RATE * parameter.main_grad
            return
        for bucket in (bucket for buffer in model.buffers for bucket in buffer.buckets):
            group = model.intra_dp_cp_group
            weights, gradients = (
                part.view(group.size(), -1)[group.rank()]
                for part in (bucket.param_data, bucket.grad_data)
            )
            weights -= RATE * gradients


def execute(case: Case, order: Order, parts: Parts = Parts()) -> list[list[Tensor]]:
    """Every rank's weights behind all iterations."""
    made_of = stage_of(parts)

    def program(rank: int) -> list[Tensor]:
        replica, stage = divmod(rank, case.stages)
        pipeline = range(replica * case.stages, (replica + 1) * case.stages)
        ranks = range(case.replicas * case.stages)
        links_of = {payload: Group(payload.name, ranks, lazy=True) for payload in Payload}
        if case.stages > 1:
            link.connect(links_of, stage, case.stages, CUDA, pipeline)
        model = wrapped(case, stage, replica)
        config = SimpleNamespace(
            no_sync_func=model.no_sync,
            grad_sync_func=model.start_grad_sync if case.aligned else None,
            grad_scale_func=None,
            deallocate_pipeline_outputs=True,
            timers=None,
        )
        for plans in case.plans:
            plan = plans[replica]
            builder, timer = Builder(plan, stage, replica), CudaClock()
            timer.start()
            compute = made_of(model, config, forward_step, builder, plan, Store({}), case.aligned)
            shape = lambda message: (ROWS + plan.chunks[message.chunk].tokens, 1, WIDTH)  # noqa: B023, E731
            links = link.Links(links_of, shape, torch.float64, CUDA, pipeline)
            model.zero_grad_buffer()
            with compute:
                given = (lower_rank(plan, stage), compute, links, Store({}), timer, NoMeter())
                Executor(*given, CurrentOp(stage)).run()
            model.finish_grad_sync()
            step(model, case)
        if case.sharded:
            model.start_param_sync(force_sync=True)
        return [parameter.detach().cpu() for parameter in model.module.parameters()]

    with of_ranks(parts):
        return run_on(World(case.replicas * case.stages, order, case.seed), program)


@contextmanager
def of_ranks(parts: Parts) -> Iterator[None]:
    """Megatron's module knows collectives by names of its own."""
    made = ("_ParamAndGradBuffer", "partition_buckets")
    with ExitStack() as stack:
        for target, replaced in (
            (parts.buffer, {"_coalescing_manager": coalescing}),
            (parts.buffer, {"log_on_each_pipeline_stage": lambda *words, **others: None}),
            (distributed_data_parallel, {name: getattr(parts.buffer, name) for name in made}),
            (parts.stage, {"ReadyOrder": parts.bucket_order.ReadyOrder}),
            (fused_head, {"rows_at_once": lambda *words: BLOCK}),
            (fused_head, {"fused_backward": parts.fused_loss.fused_backward}),
            (dist, {"get_rank": lambda group=None: HERE.host.rank}),
        ):
            stack.enter_context(patch.multiple(target, **replaced))
        names = {"reduce_scatter": "reduce_scatter_tensor", "all_gather": "all_gather_into_tensor"}
        for mine, theirs in names.items():  # which it took at its import, before ours
            late = partial(_call, theirs)
            stack.enter_context(patch.object(parts.buffer, f"dist_{mine}_func", late))
        yield


def _call(name: str, *given: Any, **others: Any) -> Any:
    return getattr(dist, name)(*given, **others)


# ------------------------------------------------------------------ what must come of it


def expected(case: Case) -> list[list[Tensor]]:
    """Every stage's weights, of all chunks of all replicas in one process."""
    host = torch.device("cpu")
    stages = [Toy(stage, stage == case.stages - 1, host) for stage in range(case.stages)]
    for plans in case.plans:
        for replica, plan in enumerate(plans):
            for chunk in range(len(plan.chunks)):
                x = rows_of(plan, chunk, replica)
                for one in stages:
                    one.received = None
                    x = one(x)
                (x * mask_of(plan, chunk)).sum().backward()
        for parameter in (parameter for one in stages for parameter in one.parameters()):
            assert parameter.grad is not None
            with torch.no_grad():
                parameter -= RATE * parameter.grad
            parameter.grad = None
    return [[parameter.detach() for parameter in one.parameters()] for one in stages]


def assert_right(case: Case, found: list[list[Tensor]]) -> None:
    right = expected(case)
    for rank, mine in enumerate(found):
        for one, other in zip(mine, right[rank % case.stages], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


CASES = (
    drawn_case(0),
    drawn_case(1, aligned=True),
    drawn_case(2, sharded=True),
    drawn_case(3, sharded=True, aligned=True),
    drawn_case(4, stages=1, replicas=4, sharded=True, instances=2),
)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_random_plans_in_every_order(order: Order, half: int) -> None:
    for case in half_of(CASES, order, half):
        assert_right(case, execute(case, order))


# module, the lines that wait for something, or put one thing behind another; what is there instead
MUTATIONS = (
    # Reductions are woken for a stage's last gradients alone.
    (
        "stage",
        "if last and self._hooks_reduce and not waits:",
        "if self._hooks_reduce:",
    ),
    ("stage", "self._last_gradients != self._last_backward:", "False:"),
    # In one order on all replicas, each behind its last gradient.
    (
        "bucket_order",
        "                deferred.accumulate(parameter)",
        "                self._report(parameter)\n                deferred.accumulate(parameter)",
    ),
    ("bucket_order", "for parameter in self._order:", "for parameter in reversed(self._order):"),
    # Megatron's own.
    ("buffer", "        self.grad_reduce_handle.wait()\n        self", "        self"),
    (
        "buffer",
        "            self.param_gather_handle.wait()\n            self.param_gather_handle = None\n"
        "            # Dispatch",
        "            self.param_gather_handle = None\n            # Dispatch",
    ),
    ("buffer", "self.communication_stream.wait_stream(torch.cuda.current_stream())", "pass"),
    ("buffer", "torch.cuda.current_stream().wait_stream(self.communication_stream)", "pass"),
)


def without(part: str, lines: str, instead: str) -> Parts:
    plain = getattr(Parts(), part)
    text = Path(plain.__file__).read_text()
    assert text.count(lines) == 1, f"{part}: {lines!r}"
    made = types.ModuleType(plain.__name__)
    made.__package__ = plain.__package__
    with patch.dict(sys.modules, {plain.__name__: made}):  # its dataclasses look there
        exec(compile(text.replace(lines, instead), plain.__file__, "exec"), vars(made))
    return Parts(**{part: made})


@pytest.mark.parametrize(
    ("part", "lines", "instead"), MUTATIONS, ids=[f"{m[0]} {n}" for n, m in enumerate(MUTATIONS)]
)
def test_without_a_line_some_order_breaks(part: str, lines: str, instead: str) -> None:
    parts = without(part, lines, instead)
    for order in ORDERS:
        for case in CASES:
            try:
                assert_right(case, execute(case, order, parts))
            except (AssertionError, RuntimeError):
                return
    raise AssertionError("nobody noticed")
