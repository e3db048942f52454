# ruff: noqa: E402  (the host is prepared before the first import of Megatron)
"""Run by test_two_replicas.py: two stages of two replicas that share experts; answers as JSON.

    two_replicas.py FOLDER

Equally many micro-batches by Megatron's schedule and in slices, unequally many in slices; then
calls that cannot go well, each of which must end on all four ranks, and a good one.
"""

import contextlib
import io
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from tests.mcore.loops.loop import (  # isort: skip  (prepares the host)
    call,
    difference,
    joined,
    micro_batches,
    outcome,
    trained,
)

import rl_loop
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.nn.utils.rnn import pad_sequence

import megatron_epp
from megatron_epp.mcore.loops.adapters.packed import PackedDocuments
from megatron_epp.mcore.loops.adapters.samples import Samples
from megatron_epp.mcore.loops.agreement import Arrivals
from megatron_epp.planner.calls.call_cost import ActivationBudget
from tests.mcore.loops.two_stages import forward_step, loss

RANKS, EXPERTS = 4, {"num_moe_experts": 4, "moe_router_load_balancing_type": "none"}
OF_REPLICAS = ((20,), (60,), (10,), (33,)), ((90,), (7,), (25,), (41,))


def packed(batch: dict) -> dict:
    """The one sample of ``batch`` as two packed documents."""
    rows = batch["tokens"].shape[1]
    bounds = torch.tensor([0, rows // 2, rows], dtype=torch.int32)
    return {name: batch[name] for name in ("tokens", "labels")} | {"cu_seqlens": bounds}


def halves(batch: dict) -> dict:
    """The same two documents as padded samples."""
    cut = batch["tokens"].shape[1] // 2
    made = {
        name: pad_sequence([batch[name][0, :cut], batch[name][0, cut:]], batch_first=True)
        for name in ("tokens", "labels")
    }
    return made | {"lengths": (cut, batch["tokens"].shape[1] - cut)}


def inside(batch: dict, losses: torch.Tensor, non_loss_data: bool = False):
    """The sum of the token losses, without the padding of samples."""
    if "lengths" in batch:
        places = torch.arange(losses.shape[1])
        losses = losses * (places < torch.tensor(batch["lengths"])[:, None])
    return losses.sum(), {"sum": losses.sum().item()}


class Renamed(Samples):
    """An adapter of another class."""


class NoRows(Samples):
    def rows(self, micro_batch, document, start, stop):
        if micro_batch["tokens"].shape[1] in (10, 25):
            raise KeyError("no rows")
        return super().rows(micro_batch, document, start, stop)


def failing_before(data_iterator, model):
    raise RuntimeError("before the layers")


def failing_after(data_iterator, model):
    forward_step(data_iterator, model)
    raise RuntimeError("after the layers")


def failing_loss(batch, losses, non_loss_data=False):
    raise RuntimeError("in the loss")


def unlike(replica: int, config) -> list[tuple]:
    """(what all ranks say, attributes of the attached model): different on replica 1."""
    there = replica == 1
    budget = ActivationBudget.of(config, rl_loop.WORDS, 2.0**30 * (1 + there))
    plain = Samples(loss)
    return [
        ("the adapter differs over", {"adapter": Renamed(loss) if there else plain}),
        ("share_from differs over .*: 0 on rank 0, 8 on rank 1", {"share_from": 8 * there}),
        ("slicing differs over .*: True on rank 0, False on rank 1", {"slicing": not there}),
        ("memory_gib differs over .*: 1.0 on rank 0, 2.0 on rank 1", {"memory": budget}),
    ]


def main() -> None:
    with joined(RANKS) as (_, answers):
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=2,
            expert_model_parallel_size=2,
            expert_tensor_parallel_size=1,
        )
        model_parallel_cuda_manual_seed(1)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        replica = parallel_state.get_data_parallel_rank()
        model = rl_loop.build_model(stage, expert_model_parallel_size=2, **EXPERTS)
        batches = micro_batches(*OF_REPLICAS[replica])
        expected = trained(model, batches, forward_step)
        ran: list = []
        made = megatron_epp.attach(model, Samples(loss), observe=ran.append)
        answers["attached"] = str(made)
        answers["equal"] = difference(trained(model, batches, forward_step), expected)
        answers["plan"] = str(ran[-1].plan)
        made.slicing = False
        answers["whole"] = difference(trained(model, batches, forward_step), expected)
        made.slicing = True

        # Unequal numbers: a sum of losses over micro-batches of both replicas is what it was.
        fewer = batches[: 3 - 2 * replica]
        made.adapter = PackedDocuments(inside)
        of_packed = trained(model, [packed(batch) for batch in fewer], forward_step)
        made.adapter = Samples(inside)
        of_samples = trained(model, [halves(batch) for batch in fewer], forward_step)
        answers["packed"] = difference(of_packed, of_samples)
        answers["chunks"] = len(ran[-1].plan.chunks), sum(not c.spans for c in ran[-1].plan.chunks)
        with torch.no_grad():
            made.adapter = Samples(loss)
            collected = partial(call, model, fewer, forward_step, forward_only=True)
            answers["forward only"] = len(collected(collect_non_loss_data=True))

        answers["bad"] = said = []
        for says, terms in unlike(replica, made.part.config):
            with patch.multiple(made, **terms):
                said.append((says, outcome(lambda: call(model, fewer, forward_step))))

        answers["failed"] = failed = {}
        for name, step, adapter in (
            ("before", failing_before, Samples(loss)),
            ("after", failing_after, Samples(loss)),
            ("loss", forward_step, Samples(failing_loss)),
            ("rows", forward_step, NoRows(loss)),
        ):
            broken = replica == 1
            made.adapter = adapter if broken and name != "rows" else Samples(loss)
            if name == "rows" and broken:
                made.adapter.rows = partial(NoRows.rows, adapter)
            step = step if broken else forward_step
            failed[name] = outcome(lambda step=step: call(model, batches, step))
        made.adapter = Samples(loss)

        # Only replica 1 asks for what slices do not do: both run by Megatron's schedule.
        answers["megatron"] = asked = []
        shapes = None if replica == 0 else lambda sent, received: (sent, received)
        strange = {"adjust_tensor_shapes_fn": shapes}
        for numbers in (batches, fewer):
            before, lines = len(ran), io.StringIO()
            with contextlib.redirect_stderr(lines):
                ended = outcome(lambda n=numbers: call(model, n, forward_step, **strange))
            asked.append((ended, len(ran) - before, lines.getvalue().count("own schedule runs")))

        answers["good"] = difference(trained(model, batches, forward_step), expected)
        arrivals = Arrivals(torch.distributed.group.WORLD)
        if replica == 0:
            arrivals.arrive()
        torch.distributed.barrier()
        answers["missing"] = arrivals.missing()


if __name__ == "__main__":
    main()
