# ruff: noqa: E402  (the host is prepared before the first import of Megatron)
"""Run by test_two_stages.py: two processes, one world, calls of all kinds; answers as JSON.

    two_stages.py FOLDER

First the contract: what Megatron's own schedule makes of a loop's hooks, and what ours does. Then
calls that cannot go well, each of which must end on both ranks, and at last one that goes well.
"""

import json
import sys
from contextlib import contextmanager, nullcontext
from itertools import batched, product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import megatron_epp
from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

import rl_loop
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.nn import functional

from megatron_epp.autoload import PIPELINE
from megatron_epp.corpus.shared_prefixes import PrefixForest, SharedSpan
from megatron_epp.mcore.loops import loop_schedule, pipelines, planned_call
from megatron_epp.mcore.loops.adapters.samples import Samples
from megatron_epp.mcore.loops.micro_batch_stage import MicroBatchStage
from megatron_epp.planner.calls import call_plan
from megatron_epp.planner.calls.call_cost import ActivationBudget
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


def rows_of(batch: dict) -> int:
    return batch["tokens"].shape[1]


def call(model, batches, step=forward_step, **named):
    several = isinstance(model, list)
    keywords = {
        "forward_step_func": step,
        "data_iterator": [iter(batches) for _ in model] if several else iter(batches),
        "model": model if several else [model],
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


def virtual_parts(rank: int) -> list:
    """Two parts of a model of four layers, as Megatron builds them for an interleaved pipeline."""
    parallel_state.set_virtual_pipeline_model_parallel_world_size(2)
    plain = rl_loop.build_model(rank)
    config = plain.config
    config.virtual_pipeline_model_parallel_size = 2
    config.microbatch_group_size_per_vp_stage = 2
    config.overlap_p2p_comm, config.batch_p2p_comm = True, False
    torch.manual_seed(rank)
    return [
        GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            rl_loop.WORDS,
            rl_loop.CONTEXT,
            pre_process=rank == part == 0,
            post_process=rank == part == 1,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            vp_stage=part,
        ).double()
        for part in range(2)
    ]


def interleaved(models) -> list:
    """What a training call and a pass of forwards do with the hooks of two parts."""
    events, (config, *_) = [], [model.config for model in models]

    def of_parts(what):
        def heard(part):
            return lambda *words: events.append([what, part]) or nullcontext()

        return [heard(part) for part in range(2)]

    def finalize(models, tokens, pg_collection, force_all_reduce):
        events.append(["finalize", len(models), int(tokens), bool(force_all_reduce)])

    hooks = {
        "no_sync_func": of_parts("no_sync"),
        "grad_sync_func": of_parts("grad_sync"),
        "finalize_model_grads_func": finalize,
        "grad_scale_func": lambda value: 8 * value,
        "calculate_per_token_loss": True,
    }
    for model in models:
        model.zero_grad(set_to_none=True)
    with patch.multiple(config, **hooks):
        made = [call(models, micro_batches())]
    with torch.no_grad():
        made.append(call(models, micro_batches(), forward_only=True))
    named = [(n, name, p) for n, m in enumerate(models) for name, p in m.named_parameters()]
    gradients = {f"{n} {name}": p.grad.clone() for n, name, p in named}
    kinds = sorted({json.dumps(event) for event in events})
    return [[made, kinds], gradients]


def heard(said: list[str], rank: int):
    """While it lasts, what the schedule says goes to ``said``."""

    def say(words: str, by: int) -> None:
        if rank == by:
            said.append(words)

    return patch.object(loop_schedule, "say", say)


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


def failures(model, rank: int) -> dict[str, str]:
    found = {}

    def many(data_iterator, model):
        output, _ = forward_step(data_iterator, model)
        return output, lambda losses: (losses, {})

    def broken(data_iterator, model):
        made = forward_step(data_iterator, model)
        if rank == 1:
            raise RuntimeError("the loop's own mistake")
        return made

    def broken_stage(*words, **named):
        raise KeyError("what nobody foresaw")

    found["twice"] = outcome(lambda: call(model, micro_batches(), twice))
    other = micro_batches((20, 60, 11, 33) if rank else LENGTHS)
    found["differ"] = outcome(lambda: call(model, other))
    found["count"] = outcome(lambda: call(model, micro_batches(), num_microbatches=3 + rank))
    found["early"] = outcome(lambda: call(model, micro_batches()[:2]))
    found["many"] = outcome(lambda: call(model, micro_batches(), many))
    found["broken"] = outcome(lambda: call(model, micro_batches(), broken))
    with patch.object(MicroBatchStage, "__init__", broken_stage) if rank else nullcontext():
        found["one stage"] = outcome(lambda: call(model, micro_batches()))
    found["again"] = outcome(megatron_epp.install_schedule)
    return found


def unforeseen(model, rank: int) -> dict[str, list]:
    """By what fails before the first op, on one rank or on all: what two calls return, how many
    plans ran, what was said."""

    def fails(*words, **named):
        raise KeyError("what nobody foresaw")

    found = {}
    for name, place in {
        "nothing": nullcontext(),
        "a rank's part": patch.object(pipelines, "guessed_rates", fails) if rank else nullcontext(),
        "groups": patch.object(planned_call, "process_groups", fails),
        "groups of one rank": patch.object(planned_call, "process_groups", fails)
        if rank
        else nullcontext(),
        "a plan": patch.object(call_plan, "unsliced_plan", fails),
        "all stages": patch.object(MicroBatchStage, "__init__", fails),
    }.items():
        ran, said = [], []
        with place, heard(said, rank), megatron_epp.install_schedule(observe=ran.append):
            made = [call(model, micro_batches()) for _ in range(2)]
        found[name] = [made, len(ran), said]
    return found


def lies(model) -> dict[str, str]:
    """What becomes of calls whose ``lengths`` cannot be believed."""

    def end(micro_batch):
        raise KeyError("seqlens")

    told = {
        "lengths that lie": lambda batch: batch["tokens"].shape[1] + 4,
        "lengths of no number": lambda batch: str(batch["tokens"].shape[1]),
        "lengths below 1": lambda batch: -3,
        "lengths that fail": end,
    }
    found = {}
    for name, lengths in told.items():
        with megatron_epp.install_schedule(lengths=lengths):
            found[name] = outcome(lambda: call(model, micro_batches()))
    return found


def padding_step(at: str):
    """A forward step that pads what says so by four rows, and takes entries out of what it draws;
    ``at``: where it is written."""

    def forward_step(data_iterator, model):
        batch = next(data_iterator)
        tokens, labels = batch.pop("input_ids", batch.get("tokens")), batch.pop("labels")
        tokens, labels = (functional.pad(rows, (0, batch["more"])) for rows in (tokens, labels))
        rows = tokens.shape[1]
        mask = torch.ones(1, 1, rows, rows, dtype=torch.bool).triu(1)
        output = model(tokens, torch.arange(rows)[None], mask, labels=labels)
        return output, lambda losses: (losses.sum(), {"loss": losses.sum().item()})

    forward_step.__module__ = at
    return forward_step


# (pad micro-batch 2 from which call on, calls that are passes of forwards, gradients add up)
MISREAD = {
    "in the first call": (0, (3,), False),
    "in a later call": (3, (), False),
    "in a later call, gradients of several": (3, (), True),
    "in a pass of forwards": (3, (3, 4), False),
}


def misread_calls(model, at: str, case: tuple) -> list:
    """What six calls return, with their gradients, hooks, and what has run through the model."""
    first, passes, adds_up = case
    name = "input_ids" if at.startswith("swift") else "tokens"
    model.train()
    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5)
    model.seen.zero_()
    made: list = []
    model.zero_grad(set_to_none=True)
    for number in range(6):
        if not adds_up:
            model.zero_grad(set_to_none=number % 2 == 0)
        batches = [
            {name: batch["tokens"], "labels": batch["labels"], "more": 0}
            for batch in micro_batches()
        ]
        batches[2]["more"] = 4 * (number >= first)
        events = []
        hooks = {
            "no_sync_func": nullcontext,
            "grad_sync_func": lambda parameters, events=events: events.append("grad_sync"),
            "finalize_model_grads_func": lambda *words, events=events, **named: events.append(
                "finalize"
            ),
        }
        passed = number in passes
        with patch.multiple(model.config, **hooks), torch.set_grad_enabled(not passed):
            found = call(model, batches, padding_step(at), forward_only=passed)
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        made.append(([item["loss"] for item in found], gradients, events, int(model.seen)))
    return made


def misread(model, rank: int) -> dict[str, list]:
    """By who laid micro-batches out otherwise, and when: whether losses, hooks and counts are those
    of Megatron's schedule, the largest difference of a gradient, plans that ran, what was said."""
    model.register_buffer("seen", torch.zeros(1), persistent=False)
    hook = model.register_forward_pre_hook(lambda module, words: module.seen.add_(1) and None)
    for layer in model.decoder.layers:
        layer.hidden_dropout = 0.1
    found = {}
    for at, (when, case) in product(("swift.megatron.trainers", "a_loop"), MISREAD.items()):
        expected, ran, said = misread_calls(model, at, case), [], []
        with heard(said, rank), megatron_epp.install_schedule(reorder=False, observe=ran.append):
            ours = misread_calls(model, at, case)
        pairs = list(zip(ours, expected, strict=True))
        same = [[mine[i] == wanted[i] for i in (0, 2, 3)] for mine, wanted in pairs]
        worst = max(
            float((gradients[name] - wanted[name]).abs().max())
            for (_, gradients, *_), (_, wanted, *_) in pairs
            for name in wanted
        )
        found[f"{at} {when}"] = [same, worst, len(ran), said]
    hook.remove()
    for layer in model.decoder.layers:
        layer.hidden_dropout = 0.0
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


def sliced_failures(model, rank: int, ran: list) -> dict[str, object]:
    found: dict[str, object] = {}
    found["half an adapter"] = outcome(lambda: megatron_epp.attach(model, object()))
    found["two chunks"] = outcome(lambda: megatron_epp.attach([model, model], Samples(loss)))
    found["no GPT"] = outcome(lambda: megatron_epp.attach(torch.nn.Linear(1, 1), Samples(loss)))
    made = megatron_epp.attach(model, Samples(loss))
    found["sliced"] = outcome(lambda: call(model, micro_batches()))
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
        surprises = unforeseen(model, rank)
        told = lies(model) | {"misread": misread(model, rank)}
        ran: list = []
        installed = megatron_epp.install_schedule(split_backward=False, observe=ran.append)
        ours, gradients = contract(model)
        worst = worst_of(gradients, expected)
        answers |= {
            "stock": stock,
            "ours": ours,
            "worst": worst,
            "unforeseen": surprises,
            **told,
            **failures(model, rank),
        }
        answers |= sliced_failures(model, rank, ran)
        installed.remove()
        answers["removed"] = get_forward_backward_func() is installed.schedule.stock[PIPELINE]
        parts = virtual_parts(rank)
        stock, expected = interleaved(parts)
        ran.clear()
        with megatron_epp.install_schedule(lengths=rows_of, observe=ran.append):
            found = [interleaved(parts) for _ in range(2)]
        answers["interleaved"] = stock, [made for made, _ in found]
        answers["interleaved worst"] = max(worst_of(each, expected) for _, each in found)
        answers["interleaved plans"] = [str(record.plan) for record in ran]


if __name__ == "__main__":
    main()
