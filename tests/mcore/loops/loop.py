# ruff: noqa: E402  (the host is prepared before the first import of Megatron)
"""A training loop for programs of this folder, which several ranks run, and what it computes.

A program's argument is a folder that all of its ranks know: there they meet and leave their answers
(conftest.py).
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from tests.waiting import LAST_RESORT_SECONDS

WORDS = 97
FOLDER = Path(sys.argv[-1])


@contextmanager
def joined(ranks: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """(rank, answers) of this process, one of ``ranks`` in one world over gloo, with float64 as
    torch's format. What is in ``answers`` at the end is written to the folder as JSON."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(FOLDER / "meeting"), ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=LAST_RESORT_SECONDS),
    )
    answers: dict[str, Any] = {}
    with cpu_host.double_precision():
        yield rank, answers
    (FOLDER / f"answers.{rank}").write_text(json.dumps(answers))


def micro_batches(*lengths: tuple[int, ...]) -> list[dict]:
    """One of documents of each ``lengths``, padded to the longest."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for of in lengths:
        shape, longest = (len(of), max(of)), max(of)
        tokens = torch.randint(WORDS, (len(of), longest + 1), generator=generator)
        inside = torch.arange(longest) < torch.tensor(of)[:, None]
        made.append(
            {
                "tokens": tokens[:, :-1],
                "labels": tokens[:, 1:],
                "loss_mask": inside.double(),
                "temperature": 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64),
                "attention_mask": torch.ones(1, 1, longest, longest, dtype=torch.bool).triu(1),
                "position_ids": torch.arange(longest).expand(shape),
                "lengths": of,
            }
        )
    return made


def inputs_of(batch: dict) -> dict:
    """Arguments of the model's forward; slices have neither positions nor a mask of their own."""
    names = "position_ids", "attention_mask"
    return {"input_ids": batch["tokens"], **{name: batch.get(name) for name in names}}


def call(model: Any, batches: list[dict], forward_step: Callable[..., Any], **named: Any) -> list:
    """A call of Megatron's schedule; ``named`` are other arguments of it."""
    keywords = {
        "forward_step_func": forward_step,
        "data_iterator": iter(batches),
        "model": [model],
        "num_microbatches": len(batches),
        "seq_length": 1,
        "micro_batch_size": 1,
    }
    return get_forward_backward_func()(**(keywords | named))


type Trained = tuple[list, dict[str, torch.Tensor]]


def trained(
    model: Any, batches: list[dict], forward_step: Callable[..., Any], **named: Any
) -> Trained:
    """What a training call returns, and the gradients that it leaves."""
    model.zero_grad(set_to_none=True)
    values, gradients = call(model, batches, forward_step, **named), {}
    for name, parameter in model.named_parameters():
        gradients[name] = parameter.grad.clone()
        if getattr(parameter, "sequence_parallel", False):  # of this rank's rows
            dist.all_reduce(gradients[name])
    return values, gradients


def difference(found: Trained, expected: Trained) -> float:
    """The largest of reported values and, relative to the largest entry, of gradients."""
    values = [
        abs(a[name] - b[name]) for a, b in zip(found[0], expected[0], strict=True) for name in b
    ]
    gradients = [
        float((found[1][name] - wanted).abs().max() / wanted.abs().max())
        for name, wanted in expected[1].items()
    ]
    return float(torch.tensor(values + gradients).max())  # what is no number among them shows


def outcome(do: Callable[[], Any]) -> str:
    """The error that ``do`` raises, as text."""
    try:
        do()
    except Exception as error:
        kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
        return f"{kind}: {error}"
    return "went well"
