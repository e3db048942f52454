"""Run by test_one_variable.py under torchrun: a loop that does not know of us, two stages.

    strangers_loop.py FOLDER

It is shaped as slime's: a source that is read at an offset, lists of tokens that its forward step
packs and pads, a wrapper that counts. Only MEGATRON_EPP in the environment asks for anything. The
model is that of examples/rl_loop.py, which is on the path, or a copy beside a copy of this
(scripts/upstream/fresh_environments.py).
"""

import json
import os
import sys
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace

import megatron_epp
from megatron_epp.mcore.patching import cpu_host

with suppress(ValueError):  # of the trainer's seams, where Megatron is another than the pinned
    cpu_host.install_cpu_host()  # a host without a GPU; nothing else here is of megatron_epp

import rl_loop
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from tests.waiting import LAST_RESORT_SECONDS

CALLS, MICRO_BATCHES, MULTIPLE = 5, 6, 8
FORWARD_STEPS = "slime.backends.megatron_utils.model"


class DataIterator:
    def __init__(self, data, micro_batch_indices):
        self.rollout_data, self.micro_batch_indices, self.offset = data, micro_batch_indices, 0

    def get_next(self, keys):
        indices = self.micro_batch_indices[self.offset]
        self.offset += 1
        data = self.rollout_data
        return {key: [data[key][i] for i in indices] if key in data else None for key in keys}


def rollout(number: int) -> DataIterator:
    random, tokens, indices = Random(number), [], []
    for _ in range(MICRO_BATCHES):
        count = random.randint(1, 3)
        indices.append(list(range(len(tokens), len(tokens) + count)))
        for _ in range(count):
            length = max(3, min(120, int(random.lognormvariate(3.5, 1.0))))
            tokens.append(torch.tensor([random.randrange(rl_loop.WORDS) for _ in range(length)]))
    return DataIterator({"tokens": tokens}, indices)


def step_of(args, really: int):
    """A forward step that pads to a multiple of ``really``; ``args`` say to which."""

    def forward_step(data_iterator, model):
        assert args.data_pad_size_multiplier  # closed over, as slime's does
        documents = data_iterator.get_next(["tokens"])["tokens"]
        lengths = [len(document) for document in documents]
        rows = -(-sum(lengths) // really) * really
        lengths += [rows - sum(lengths)]
        tokens = torch.zeros(1, rows, dtype=torch.long)
        tokens[0, : sum(lengths[:-1])] = torch.cat(documents)
        places = torch.cat([torch.arange(length) for length in lengths])[None]
        blocks = [torch.ones(length, length, dtype=torch.bool).tril() for length in lengths]
        mask = ~torch.block_diag(*blocks)[None, None]
        labels = torch.roll(tokens, -1, 1)
        return model(tokens, places, mask, labels=labels), partial(loss, sum(lengths[:-1]))

    def wrapped_forward_step(*words, **named):
        return forward_step_func(*words, **named)

    forward_step_func = forward_step
    forward_step.__module__ = wrapped_forward_step.__module__ = FORWARD_STEPS
    return wrapped_forward_step


def loss(count, losses):
    value = losses[0, :count].mean()
    return value, {"loss": value.item()}


def calls(function, model, step) -> list:
    made = []
    for number in range(CALLS):
        model.zero_grad(set_to_none=True)
        found = function(
            forward_step_func=step, data_iterator=[rollout(number)], model=[model],
            num_microbatches=MICRO_BATCHES, seq_length=1, micro_batch_size=1,
        )  # fmt: skip
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        made.append(([item["loss"] for item in found], gradients))
    return made


def main() -> None:
    rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=LAST_RESORT_SECONDS))
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    own = schedules.forward_backward_pipelining_without_interleaving
    own = getattr(own, "__wrapped__", own)
    answers = {}
    with cpu_host.double_precision():
        model_parallel_cuda_manual_seed(1)
        for name, really in (("as it says", MULTIPLE), ("otherwise", 2 * MULTIPLE)):
            model = rl_loop.build_model(rank)
            args = SimpleNamespace(data_pad_size_multiplier=MULTIPLE)
            step = step_of(args, really)
            stock = calls(own, model, step)
            ours = calls(get_forward_backward_func(), model, step)
            worst = max(
                float((gradients[key] - wanted[key]).abs().max() / wanted[key].abs().max())
                for (_, gradients), (_, wanted) in zip(ours, stock, strict=True)
                for key in wanted
            )
            same = [losses for losses, _ in ours] == [losses for losses, _ in stock]
            answers[name] = {"worst": worst, "losses equal": same}
    schedule = getattr(schedules.forward_backward_no_pipelining, "__megatron_epp__", None)
    answers["calls"] = schedule.schedule._calls if schedule else 0
    answers["places"] = [megatron_epp.__file__, parallel_state.__file__]
    (folder / f"answers.{rank}").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
