# ruff: noqa: E402  (the host is prepared before the first import of Megatron)
"""Run by test_two_stages.py: two processes, one world, calls of all kinds; answers as JSON.

    two_stages.py FOLDER

First the contract: what Megatron's own schedule makes of a loop's hooks, and what slices do. Then
calls that cannot go well, each of which must end on both ranks, and good ones; at last calls after
process groups were made anew.
"""

import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import batched
from pathlib import Path
from random import Random
from types import SimpleNamespace
from unittest.mock import patch

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from tests.mcore.loops.loop import (  # isort: skip  (prepares the host)
    FOLDER,
    WORDS,
    Trained,
    call,
    difference,
    inputs_of,
    joined,
    micro_batches,
    outcome,
    trained,
)

import own_adapter
import rl_loop
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

import megatron_epp
from megatron_epp.corpus.shared_prefixes import PrefixForest, SharedSpan
from megatron_epp.ir import FULL, KEEP
from megatron_epp.mcore.loops import pipelines
from megatron_epp.mcore.loops.adapters.samples import Samples
from megatron_epp.mcore.loops.install import Installation, installed
from megatron_epp.mcore.loops.loop_schedule import PIPELINE
from megatron_epp.mcore.loops.settings import Settings
from megatron_epp.mcore.loops.slice_stage import SliceStage
from megatron_epp.planner.calls.call_cost import ActivationBudget
from megatron_epp.planner.calls.call_plan import call_plans
from tests.certify.loops.micro_batches import arbitrary_sliced_plans
from tests.mcore.loops.rebuilt_groups import ReloadableWorld

BATCHES = micro_batches((20,), (60,), (10,), (33,))


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    return model(**inputs_of(batch), labels=batch["labels"]), partial(loss, batch)


def loss(batch, losses, non_loss_data=False):
    if non_loss_data:
        return round(losses.sum().item(), 9)
    return losses.sum(), torch.tensor(losses.numel()), {"rows": losses.numel()}


class Timers:
    """Notes which timers are started and stopped, and how often, as Megatron's would."""

    def __init__(self):
        self.seen: dict[str, int] = {}

    def __call__(self, name, log_level=0):
        def note(what, **named):
            key = f"{name} {what}"
            self.seen[key] = self.seen.get(key, 0) + 1

        return SimpleNamespace(
            start=lambda **named: note("start", **named), stop=lambda: note("stop")
        )


def contract(model) -> tuple[list, Trained]:
    """What a training call and two passes of forwards do with the loop's hooks."""
    events, config = [], model.config
    backward = torch.autograd.backward

    @contextmanager
    def no_sync():
        events.append("no_sync")
        yield
        events.append("sync")

    def finalize(models, tokens, pg_collection, force_all_reduce):
        events.append(["finalize", len(models), int(tokens), bool(force_all_reduce)])

    timers = Timers()
    hooks = {
        "no_sync_func": no_sync,
        "grad_sync_func": lambda parameters: events.append("grad_sync"),
        "finalize_model_grads_func": finalize,
        "grad_scale_func": lambda value: 8 * value,
        "calculate_per_token_loss": True,
        "timers": timers,
    }

    def run_backward(*args, **named):
        if "sync" not in events:
            events.append("backward")
        return backward(*args, **named)

    with patch.multiple(config, **hooks), patch("torch.autograd.backward", run_backward):
        made = trained(model, BATCHES, forward_step, force_all_reduce=True)
    with torch.no_grad():
        made_more = [
            call(model, BATCHES, forward_step, forward_only=True, collect_non_loss_data=collects)
            for collects in (False, True)
        ]
    # Megatron's messages have timers of their own; ours are received early, and have none.
    counted = ("forward-backward", "forward-compute", "backward-compute")
    counts = {key: n for key, n in sorted(timers.seen.items()) if key.split()[0] in counted}
    return [made[0], made_more, events, counts], made


# ------------------------------------------------------------------ calls that cannot go well


def twice(data_iterator, model):
    made = forward_step(data_iterator, model)
    next(data_iterator)
    return made


def summed(data_iterator, model):
    output, made = forward_step(data_iterator, model)
    return output.sum() if output.dim() == 2 else output, made


def fails(*words, **named):
    raise KeyError("what nobody foresaw")


class Lying(Samples):
    """``says`` more tokens than there are in micro-batch 1."""

    def lengths(self, micro_batch):
        length = micro_batch["tokens"].shape[1]
        return (length + 2,) if length == 60 else (length,)


class ShortMasks(Samples):
    def rows(self, micro_batch, document, start, stop):
        made = dict(super().rows(micro_batch, document, start, stop))
        return made | {"loss_mask": made["loss_mask"][:, :-1]}


class Sharing(Samples):
    """Says that documents are ``nodes``: (document, start, stop, parent); stop 0 is the end."""

    def __init__(self, *nodes: tuple[int, int, int, int], last: tuple[int, ...] | None = None):
        super().__init__(loss)
        self.nodes, self.last = nodes, last or (len(nodes) - 1,)

    def prefixes(self, micro_batch):
        length = micro_batch["tokens"].shape[1]
        spans = (SharedSpan(d, start, stop or length, p) for d, start, stop, p in self.nodes)
        return PrefixForest(tuple(spans), self.last)


class NoForest(Samples):
    def prefixes(self, micro_batch):
        return [5]


def with_front(adapter: Samples) -> Samples:
    adapter.inputs = lambda batch, document: {"input_ids": batch["tokens"]}
    return adapter


def bad_calls(rank: int) -> list[tuple]:
    """(what both ranks say, adapter, micro-batches, arguments of the call)."""
    plain = Samples(loss)
    others = micro_batches((20,), (60,), (11 if rank else 10,), (33,))
    beside = [
        {name: torch.cat((a[name], b[name])) for name in ("tokens", "labels", "loss_mask")}
        for a, b in batched(micro_batches(*((20,),) * 8), 2)
    ]
    prefixes = "rank 0: the adapter's prefixes of micro-batch 0"
    return [
        (
            "rank 0: the forward step drew twice for one chunk: expected one draw",
            plain, BATCHES, {"forward_step_func": twice},
        ),
        (
            r"micro-batch 2 differs over ranks: documents of \(10,\) on rank 0, \(11,\) on rank 1",
            plain, others, {},
        ),
        (
            r"num_microbatches differs over the ranks of a pipeline: \[3, 4\]; expected one number",
            plain, BATCHES, {"num_microbatches": 3 + rank},
        ),
        (
            "rank 0: the data iterator ended after 2 of the 4 micro-batches",
            plain, BATCHES[:2], {"num_microbatches": 4},
        ),
        (
            r"rank 0: the adapter's rows of micro-batch 1, document 0, tokens \[\d+:62\]: 'tokens' "
            r"has shape \(1, \d+\); expected \[1, \d+, \.\.\.\] \(does it have as many as",
            Lying(loss), BATCHES, {},
        ),
        ("rank 0: the adapter's rows of .*'loss_mask' has shape", ShortMasks(loss), BATCHES, {}),
        (
            r"rank 1: micro-batch .*the loss has shape \(1, ",
            Samples(lambda batch, losses: (losses, {})), BATCHES, {},
        ),
        (
            "rank 1: the forward step's output for",
            plain, BATCHES, {"forward_step_func": summed},
        ),
        (
            f"{prefixes}: node 0 continues node 1; expected",
            Sharing((0, 0, 5, 1), (0, 5, 0, 0)), BATCHES, {},
        ),
        (
            rf"{prefixes}: node 1 holds tokens \[7:20\] of sequence 0, of 20; expected some from 5",
            Sharing((0, 0, 5, -1), (0, 7, 0, 0)), BATCHES, {},
        ),
        (f"{prefixes}: sequence 0 ends with node 0", Sharing((0, 0, 5, -1)), BATCHES, {}),
        (f"{prefixes} are list; expected what", NoForest(loss), BATCHES, {}),
        (
            rf"{prefixes}: 'tokens' of document 1 in \[0",
            Sharing((0, 0, 5, -1), (0, 5, 0, 0), (1, 5, 0, 0), last=(1, 2)), beside, {},
        ),
        (
            "shared prefixes: what stands in front of the layers sees documents",
            with_front(Sharing((0, 0, 5, -1), (0, 5, 0, 0))), BATCHES, {},
        ),
        (
            "rank 0: the adapter says 300 tokens for document 0 of micro-batch 1; expected 1",
            plain, micro_batches((20,), (300,), (10,), (33,)), {},
        ),
    ]  # fmt: skip


def bad_attaches(model, adapter) -> list[tuple]:
    """(what is said, model, adapter, other arguments)."""
    holds = "holds no module of Megatron's with a decoder of Megatron's layers"
    alone = "expected in the process's first attach only"
    return [
        (rf"attach\(timeout=, observe=\): {alone}", model, adapter, {"observe": print}),
        ("attach: the adapter has no function 'lengths'; expected lengths", model, object(), {}),
        ("attach: 2 model chunks on a rank; expected one", [model, model], adapter, {}),
        (f"attach: a Linear {holds}", torch.nn.Linear(1, 1), adapter, {}),
        ("attach: this model is attached already", model, adapter, {}),
    ]


def failures(model, made, rank: int) -> dict[str, object]:
    def good() -> str:
        made.adapter = Samples(loss)
        return outcome(lambda: call(model, BATCHES, forward_step))

    def broken(data_iterator, model):
        made = forward_step(data_iterator, model)
        if rank == 1:
            raise RuntimeError("the loop's own mistake")
        return made

    said = []
    for says, whole, adapter, named in bad_attaches(model, made.adapter):
        attach = partial(megatron_epp.attach, whole, adapter, **named)
        said.append((says, outcome(attach)))
    found: dict[str, object] = {"bad": said, "good": [good()]}
    found["broken"] = outcome(lambda: call(model, BATCHES, broken))
    with patch.object(SliceStage, "__init__", fails) if rank else nullcontext():
        found["one stage"] = outcome(lambda: call(model, BATCHES, forward_step))
    for says, made.adapter, batches, named in bad_calls(rank):
        said.append((says, outcome(partial(call, model, batches, forward_step, **named))))
    for made.slicing in (False, True):
        found["good"].append(good())
    return found


# ------------------------------------------------------------------ calls that go well


def recomputed(model, attached, ran: list) -> list:
    """The largest difference that recompute makes to gradients of slices, the loop's own and that
    of a plan within little memory; and what the plan recomputes on this stage."""
    static = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    model.train()
    made, letters = [], []
    for settings, mib, attached.slicing in (
        (dict.fromkeys(static), None, True),
        (static, None, True),
        (static, 0.6, True),
        (static, 0.85, False),
    ):
        budget = mib and ActivationBudget.of(model.config, WORDS, mib * 2**20)
        attached.memory = budget
        with patch.multiple(model.config, **settings):
            made.append(trained(model, BATCHES, forward_step))
        letters.append("".join(ran[-1].plan.recompute[ran[-1].records[0].stage]))
    attached.memory, attached.slicing = None, True
    return [max(difference(one, made[0]) for one in made[1:]), *letters[2:]]


def left_padded() -> list[dict]:
    """Micro-batches of the framework that examples/own_adapter.py serves."""
    generator, made = torch.Generator().manual_seed(4), []
    for lengths in ((20, 60), (10,), (33, 7, 41), (5, 64)):
        rows = max(lengths)
        inside = torch.arange(rows)[None] >= rows - torch.tensor(lengths)[:, None]
        tokens = torch.randint(WORDS, inside.shape, generator=generator)
        advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
        made.append(
            {"sequences": tokens, "attention_mask": inside.long(), "advantages": advantages}
        )
    return made


def plans_of_whole_backwards(calls, layers, rates, options, forward_only):
    return call_plans(calls, layers, rates, replace(options, split=False), forward_only)


def drawn_plans(calls, layers, rates, options, forward_only):
    modes, random = KEEP + FULL, Random(0)
    return arbitrary_sliced_plans(calls, layers, random, False, forward_only, modes)


def made_anew(model, world: ReloadableWorld, expected: Trained, ran: list) -> list:
    """The largest difference of calls after groups were made anew; how many plans ran, and how many
    links first spoke in the midst of one."""
    before, worst = len(ran), 0.0
    for rebuild in (world.rebuild, world.rebuild, world.rebuild_world):
        rebuild()
        worst = max(worst, difference(trained(model, BATCHES, forward_step), expected))
    return [worst, len(ran) - before, world.late]


def main() -> None:
    with joined(2) as (rank, answers):
        world = ReloadableWorld(dist.FileStore(str(FOLDER / "second meeting"), 2))
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
        model_parallel_cuda_manual_seed(1)
        model = rl_loop.build_model(rank)
        model.config.finalize_model_grads_func = None
        answers["stock"], expected = contract(model)
        plainly = trained(model, BATCHES, forward_step)
        padded = trained(model, left_padded(), own_adapter.forward_step)
        ran: list = []
        settings = Settings(make_plans=plans_of_whole_backwards, observe=ran.append)
        with Installation(settings) as unattached:
            answers["not attached"] = contract(model)[0] == answers["stock"], len(ran)
            stocks = unattached.schedule.stock
            made = megatron_epp.attach(model, Samples(loss))
            answers["sliced"], sliced = contract(model)
            answers["chunks"] = [len(record.plan.chunks) for record in ran]
            made.slicing = False
            answers["whole"], whole = contract(model)
            answers["worst"] = max(difference(one, expected) for one in (sliced, whole))
            made.slicing = True
            answers |= failures(model, made, rank)
            answers["recomputed"] = recomputed(model, made, ran)
            answers["made anew"] = made_anew(model, world, plainly, ran)
        answers["removed"] = installed() is None
        with Installation(replace(settings, make_plans=drawn_plans)):
            made.adapter = own_adapter.OwnAdapter()
            found = trained(model, left_padded(), own_adapter.forward_step)
            answers["own adapter"] = difference(found, padded), len(ran[-1].plan.chunks)
            made.adapter = Samples(loss)
        with (
            Installation(settings),
            patch.object(pipelines, "guessed_rates", fails) if rank else nullcontext(),
        ):
            answers["no pipeline"] = outcome(lambda: call(model, BATCHES, forward_step))
        answers["removed"] &= get_forward_backward_func() is stocks[PIPELINE]


if __name__ == "__main__":
    main()
