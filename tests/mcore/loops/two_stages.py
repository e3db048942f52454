# ruff: noqa: E402  (the host is prepared before the first import of Megatron)
"""Run by test_two_stages.py: two processes, one world, calls of all kinds; answers as JSON.

    two_stages.py FOLDER

First the contract: what Megatron's own schedule makes of a loop's hooks, and what slices do. Then
calls that cannot go well, each of which must end on both ranks, and at last one that goes well.
"""

import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import batched
from pathlib import Path
from random import Random
from types import SimpleNamespace
from unittest.mock import patch

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import megatron_epp
from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

import own_adapter
import rl_loop
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_epp.corpus.shared_prefixes import PrefixForest, SharedSpan
from megatron_epp.ir import FULL, KEEP
from megatron_epp.mcore.loops import pipelines
from megatron_epp.mcore.loops.adapters.samples import Samples
from megatron_epp.mcore.loops.install import Installation, installed
from megatron_epp.mcore.loops.loop_schedule import PIPELINE
from megatron_epp.mcore.loops.settings import Settings
from megatron_epp.mcore.loops.slice_stage import SliceStage
from megatron_epp.planner.calls.call_cost import ActivationBudget
from megatron_epp.planner.calls.call_options import CallOptions
from tests.certify.loops.micro_batches import arbitrary_sliced_plan
from tests.mcore.loops.joined import joined

LENGTHS = (20, 60, 10, 33)


def micro_batches(lengths=LENGTHS) -> list[dict]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for length in lengths:
        tokens = torch.randint(rl_loop.WORDS, (1, length + 1), generator=generator)
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        made.append(
            {
                "tokens": tokens[:, :-1],
                "labels": tokens[:, 1:],
                "loss_mask": torch.ones(1, length),
                "attention_mask": mask,
            }
        )
    return made


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    places = torch.arange(batch["tokens"].shape[1])[None]
    output = model(batch["tokens"], places, batch.get("attention_mask"), labels=batch["labels"])
    return output, lambda losses, **named: loss(batch, losses, **named)


def loss(batch, losses, non_loss_data=False):
    if non_loss_data:
        return round(losses.sum().item(), 9)
    return losses.sum(), torch.tensor(losses.numel()), {"rows": losses.numel()}


def call(model, batches, step=forward_step, **named):
    keywords = {
        "forward_step_func": step,
        "data_iterator": iter(batches),
        "model": [model],
        "num_microbatches": len(LENGTHS),
        "seq_length": 1,
        "micro_batch_size": 1,
    }
    return get_forward_backward_func()(**(keywords | named))


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


def contract(model) -> list:
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

    model.zero_grad(set_to_none=True)
    with patch.multiple(config, **hooks), patch("torch.autograd.backward", run_backward):
        made = call(model, micro_batches(), force_all_reduce=True)
    made_more = []
    with torch.no_grad():
        made_more.append(call(model, micro_batches(), forward_only=True))
        made_more.append(
            call(model, micro_batches(), forward_only=True, collect_non_loss_data=True)
        )
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    # Megatron's messages have timers of their own; ours are received early, and have none.
    counted = ("forward-backward", "forward-compute", "backward-compute")
    counts = {key: n for key, n in sorted(timers.seen.items()) if key.split()[0] in counted}
    return [[made, made_more, events, counts], gradients]


def outcome(do) -> str:
    try:
        do()
    except Exception as error:
        kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
        return f"{kind}: {error}"
    return "went well"


def twice(data_iterator, model):
    made = forward_step(data_iterator, model)
    next(data_iterator)
    return made


def fails(*words, **named):
    raise KeyError("what nobody foresaw")


def failures(model, made, rank: int) -> dict[str, str]:
    found = {}

    def broken(data_iterator, model):
        made = forward_step(data_iterator, model)
        if rank == 1:
            raise RuntimeError("the loop's own mistake")
        return made

    found["count"] = outcome(lambda: call(model, micro_batches(), num_microbatches=3 + rank))
    found["early"] = outcome(lambda: call(model, micro_batches()[:2]))
    found["broken"] = outcome(lambda: call(model, micro_batches(), broken))
    with patch.object(SliceStage, "__init__", fails) if rank else nullcontext():
        found["one stage"] = outcome(lambda: call(model, micro_batches()))
    found["observed late"] = outcome(
        lambda: megatron_epp.attach(model, made.adapter, observe=print)
    )
    return found


class Lying(Samples):
    """``says`` more tokens than there are in micro-batch 1."""

    def lengths(self, micro_batch):
        length = micro_batch["tokens"].shape[1]
        return (length + 2,) if length == 60 else (length,)


class ShortMasks(Samples):
    def rows(self, micro_batch, document, start, stop):
        made = dict(super().rows(micro_batch, document, start, stop))
        return made | {"loss_mask": made["loss_mask"][:, :-1]}


def recomputed(model, attached, ran: list) -> list:
    """The largest difference that recompute makes to gradients of slices, the loop's own and that
    of a plan within little memory; and what the plan recomputes on this stage."""
    static = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    model.train()
    little = ActivationBudget.of(model.config, rl_loop.WORDS, 0.6 * 2**20)
    little_for_whole = ActivationBudget.of(model.config, rl_loop.WORDS, 0.85 * 2**20)
    made, letters = [], []
    for settings, memory, slicing in (
        (dict.fromkeys(static), None, True),
        (static, None, True),
        (static, little, True),
        (static, little_for_whole, False),
    ):
        model.zero_grad(set_to_none=True)
        attached.memory, attached.slicing = memory, slicing
        with patch.multiple(model.config, **settings):
            call(model, micro_batches())
        made.append({name: p.grad.clone() for name, p in model.named_parameters()})
        letters.append("".join(ran[-1].plan.recompute[ran[-1].records[0].stage]))
    attached.memory, attached.slicing = None, True
    plain, *others = made
    worst = max(
        float((again[name] - plain[name]).abs().max() / plain[name].abs().max())
        for again in others
        for name in plain
    )
    return [worst, *letters[2:]]


def sliced_failures(model, made, rank: int, ran: list) -> dict[str, object]:
    found: dict[str, object] = {}
    found["half an adapter"] = outcome(lambda: megatron_epp.attach(model, object()))
    found["two chunks"] = outcome(lambda: megatron_epp.attach([model, model], Samples(loss)))
    found["no GPT"] = outcome(lambda: megatron_epp.attach(torch.nn.Linear(1, 1), Samples(loss)))
    found["goes"] = outcome(lambda: call(model, micro_batches()))
    found["recomputed"] = recomputed(model, made, ran)
    found["sliced twice"] = outcome(lambda: call(model, micro_batches(), twice))
    other = micro_batches((20, 60, 11, 33) if rank else LENGTHS)
    found["sliced differ"] = outcome(lambda: call(model, other))
    found["attached again"] = outcome(lambda: megatron_epp.attach(model, Samples(loss)))
    made.adapter = Lying(loss)
    found["lying"] = outcome(lambda: call(model, micro_batches()))
    made.adapter = ShortMasks(loss)
    found["short masks"] = outcome(lambda: call(model, micro_batches()))
    made.adapter = Samples(lambda batch, losses: (losses, {}))
    found["no scalar"] = outcome(lambda: call(model, micro_batches()))

    def summed(data_iterator, model):
        output, made = forward_step(data_iterator, model)
        return output.sum() if output.dim() == 2 else output, made

    made.adapter = Samples(loss)
    found["no outputs"] = outcome(lambda: call(model, micro_batches(), summed))
    found |= shared_failures(model, made)
    made.adapter = Samples(loss)
    found["too long"] = outcome(lambda: call(model, micro_batches((20, 300, 10, 33))))
    made.slicing = False
    found["whole again"] = outcome(lambda: call(model, micro_batches()))
    made.slicing = True
    found["at last"] = outcome(lambda: call(model, micro_batches()))
    return found


class Sharing(Samples):
    """Says of a micro-batch's documents what it is told to: ``forest(tokens of each)``."""

    def __init__(self, forest, front: bool = False):
        super().__init__(loss)
        self.forest = forest
        if front:
            self.inputs = lambda batch, document: {"input_ids": batch["tokens"]}

    def prefixes(self, micro_batch):
        return self.forest(micro_batch["tokens"].shape[1])


def shared_failures(model, made) -> dict[str, str]:
    """Forests that are none."""

    def one(*nodes: tuple[int, int, int]):
        """Of one document: (start, stop, parent)."""
        return PrefixForest(tuple(SharedSpan(0, *node) for node in nodes), (len(nodes) - 1,))

    def two(length: int):
        """Of two documents that begin alike."""
        nodes = (0, 0, 5, -1), (0, 5, length, 0), (1, 5, length, 0)
        return PrefixForest(tuple(SharedSpan(*node) for node in nodes), (1, 2))

    alone = micro_batches()
    of_two = [
        {name: torch.cat((a[name], b[name])) for name in ("tokens", "labels", "loss_mask")}
        for a, b in batched(micro_batches((20,) * 8), 2)
    ]
    cases = {
        "circle": (Sharing(lambda length: one((0, 5, 1), (5, length, 0))), alone),
        "gap": (Sharing(lambda length: one((0, 5, -1), (7, length, 0))), alone),
        "no end": (Sharing(lambda length: one((0, 5, -1))), alone),
        "no forest": (Sharing(lambda length: [5]), alone),
        "other tokens": (Sharing(two), of_two),
        "shared in front": (
            Sharing(lambda length: one((0, 5, -1), (5, length, 0)), front=True),
            alone,
        ),
    }
    found = {}
    for name, (made.adapter, batches) in cases.items():
        found[name] = outcome(lambda batches=batches: call(model, batches))
    return found


def left_padded() -> list[dict]:
    """Micro-batches of the framework that examples/own_adapter.py serves."""
    generator, made = torch.Generator().manual_seed(4), []
    for lengths in ((20, 60), (10,), (33, 7, 41), (5, 64)):
        rows = max(lengths)
        inside = torch.arange(rows)[None] >= rows - torch.tensor(lengths)[:, None]
        tokens = torch.randint(rl_loop.WORDS, inside.shape, generator=generator)
        made.append(
            {
                "sequences": tokens,
                "attention_mask": inside.long(),
                "advantages": torch.randn(len(lengths), generator=generator, dtype=torch.float64),
            }
        )
    return made


def drawn_plan(lengths, layers, rates, options, forward_only):
    modes, random = KEEP + FULL, Random(0)
    return arbitrary_sliced_plan(lengths, layers, random, options.split, forward_only, modes)


def of_own_adapter(model, made=None) -> tuple[list, dict]:
    """Losses and gradients of a call: by Megatron's schedule, or in slices of ``made``."""
    model.zero_grad(set_to_none=True)
    if made is not None:
        made.adapter = own_adapter.OwnAdapter()
    losses = call(model, left_padded(), own_adapter.forward_step)
    return losses, {name: p.grad.clone() for name, p in model.named_parameters()}


def worst_of(gradients: dict, expected: dict) -> float:
    return max(
        float((gradients[name] - expected[name]).abs().max() / expected[name].abs().max())
        for name in expected
    )


def main() -> None:
    with joined(2) as (rank, _, answers):
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
        model_parallel_cuda_manual_seed(1)
        model = rl_loop.build_model(rank)
        model.config.finalize_model_grads_func = None
        stock, expected = contract(model)
        padded_losses, padded_gradients = of_own_adapter(model)
        ran: list = []
        settings = Settings(options=CallOptions(split=False), observe=ran.append)
        with Installation(settings) as unattached:
            answers["not attached"] = contract(model)[0] == stock, len(ran)
            stocks = unattached.schedule.stock
            made = megatron_epp.attach(model, Samples(loss))
            sliced, gradients = contract(model)
            chunks = [len(record.plan.chunks) for record in ran]
            made.slicing = False
            whole, other_gradients = contract(model)
            answers |= {
                "stock": stock,
                "sliced": sliced,
                "whole": whole,
                "chunks": chunks,
                "worst": max(worst_of(one, expected) for one in (gradients, other_gradients)),
            }
            made.slicing = True
            answers |= failures(model, made, rank) | sliced_failures(model, made, rank, ran)
        answers["removed"] = installed() is None
        with Installation(replace(settings, make_plan=drawn_plan)):
            losses, gradients = of_own_adapter(model, made)
            far = [abs(a["loss"] - b["loss"]) for a, b in zip(losses, padded_losses, strict=True)]
            worst = max([*far, worst_of(gradients, padded_gradients)])
            answers["own adapter"] = worst, len(ran[-1].plan.chunks)
            made.adapter = Samples(loss)
        with (
            Installation(settings),
            patch.object(pipelines, "guessed_rates", fails) if rank else nullcontext(),
        ):
            answers["no pipeline"] = outcome(lambda: call(model, micro_batches()))
        answers["removed"] &= get_forward_backward_func() is stocks[PIPELINE]


if __name__ == "__main__":
    main()
