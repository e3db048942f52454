#!/usr/bin/env python3
# ruff: noqa: E402  (the examples beside this are imported from their folders)
"""NeMo-RL's own training loop over Megatron, run by Megatron's schedule and by ours.

    git clone --depth 1 https://github.com/NVIDIA-NeMo/RL NeMo-RL
    scripts/upstream/nemo_rl_loop.py --nemo-rl NeMo-RL

Executes nemo_rl/models/megatron/train.py of that checkout: its megatron_forward_backward, forward
step and loss post-processing, in two processes with a stage each of a tiny GPT in float64. What
that file imports from the rest of NeMo-RL (Ray, vLLM and more behind it) is replaced by stand-ins:
a loss of our own on the logits, no draft model, no router replay. Prints the losses and the largest
difference of a gradient, and fails above 1e-12. Nothing of NeMo-RL is copied into this project.
"""

import sys
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "scripts" / "upstream")]

import rl_loop
import torch
from framework_runs import Anything, require_equal, run_stages, show_order, stage_in_float64

import megatron_epp

SOURCE = "nemo_rl/models/megatron/train.py"
LENGTHS = (20, 130, 9, 33, 64)


class Batch(dict):
    """As far as the loop asks a BatchedDataDict."""

    def get_multimodal_dict(self, **how: Any) -> dict:
        return {}


class ProcessedMicroBatch(types.SimpleNamespace):
    """As far as the loop asks one of NeMo-RL's; what only other models have is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def stand_ins() -> None:
    """Modules of NeMo-RL that its loop imports, by name; everything in them is a mock, but for
    what runs here."""
    for name in (
        "nemo_rl", "nemo_rl.algorithms", "nemo_rl.algorithms.logits_sampling_utils",
        "nemo_rl.algorithms.loss", "nemo_rl.algorithms.loss.interfaces",
        "nemo_rl.algorithms.utils", "nemo_rl.distributed", "nemo_rl.distributed.batched_data_dict",
        "nemo_rl.distributed.model_utils", "nemo_rl.models", "nemo_rl.models.megatron",
        "nemo_rl.models.megatron.config", "nemo_rl.models.megatron.data",
        "nemo_rl.models.megatron.draft", "nemo_rl.models.megatron.draft.hidden_capture",
        "nemo_rl.models.megatron.router_replay", "nemo_rl.models.policy",
    ):  # fmt: skip
        sys.modules[name] = Anything(name)
    loss: Any = sys.modules["nemo_rl.algorithms.loss"]
    loss.wrap_loss_fn_with_input_preparation = lambda logits, *, loss_fn, data, **others: loss_fn(
        data, logits
    )
    capture: Any = sys.modules["nemo_rl.models.megatron.draft.hidden_capture"]
    capture.get_capture_context = lambda model, enabled: (nullcontext(), None)
    batched: Any = sys.modules["nemo_rl.distributed.batched_data_dict"]
    batched.BatchedDataDict = dict  # it is written BatchedDataDict[Any]


def load(checkout: Path) -> types.ModuleType:
    """The loop's module; whatever else it imports of NeMo-RL is a mock."""
    stand_ins()
    source = (checkout / SOURCE).read_text()
    module = types.ModuleType("nemo_rl.models.megatron.train")  # known by its name
    module.__dict__["suspend_activation_offload_for_forward_only"] = None
    for line in source.splitlines():
        words = line.split()
        if words[:1] == ["from"] and words[1].startswith("nemo_rl"):
            assert words[1] in sys.modules, f"{SOURCE} imports {words[1]}, which has no stand-in"
    exec(compile(source, str(checkout / SOURCE), "exec"), module.__dict__)
    module.suspend_activation_offload_for_forward_only = lambda *any: nullcontext()  # type: ignore[attr-defined]
    return module


def micro_batches() -> list[Any]:
    torch.manual_seed(0)
    made = []
    for length in LENGTHS:
        tokens = torch.randint(rl_loop.WORDS, (2, length + 1))
        inputs = tokens[:, :-1]
        made.append(
            ProcessedMicroBatch(
                data_dict=Batch(targets=tokens[:, 1:], input_ids=inputs),
                input_ids=inputs,
                input_ids_cp_sharded=inputs,
                attention_mask=torch.ones(1, 1, length, length, dtype=torch.bool).triu(1),
                position_ids=torch.arange(length).expand(2, length),
            )
        )
    return made


def loss(data: Any, logits_BSV: torch.Tensor) -> tuple[torch.Tensor, dict]:
    """A mean over each sequence, then over the sequences."""
    chosen_BS = logits_BSV.log_softmax(-1).gather(-1, data["targets"][..., None])[..., 0]
    value = -chosen_BS.mean(1).mean()
    return value, {"loss": value.item()}


def train(loop: Any, model: Any) -> list[dict]:
    model.zero_grad(set_to_none=True)
    processor = loop.LossPostProcessor(
        lambda data, logits: loss(data, logits),
        {"sequence_packing": {"enabled": False}},
        num_microbatches=len(LENGTHS),
    )
    # The post-processor hands its arguments on by name; ours is given logits and data.
    return loop.megatron_forward_backward(
        model=model,
        data_iterator=iter(micro_batches()),
        num_microbatches=len(LENGTHS),
        seq_length=1,
        mbs=2,
        post_processing_fn=processor,
    )


def work(rank: int, meeting: str, checkout: Path) -> None:
    with stage_in_float64(rank, meeting, lambda: load(checkout)) as (loop, model):
        stock = train(loop, model)
        expected = {name: p.grad.clone() for name, p in model.named_parameters()}
        ran: list[Any] = []
        megatron_epp.install_schedule(observe=ran.append)
        # The first shows that its micro-batches are read rightly, seconds are measured in the
        # second; later ones run by them.
        for _ in range(4):
            ours = train(loop, model)
    errors = [
        float((p.grad - expected[name]).abs().max() / expected[name].abs().max())
        for name, p in model.named_parameters()
    ]
    assert len(ran) == 3, "the loop did not come by our schedule"
    show_order(rank, errors, ran)
    if rank == rl_loop.STAGES - 1:
        for number, (a, b) in enumerate(zip(stock, ours, strict=True)):
            print(f"loss of micro-batch {number}: {a['loss']:.15f} stock, {b['loss']:.15f} ours")
            errors.append(abs(a["loss"] - b["loss"]))
    require_equal(rank, errors)


if __name__ == "__main__":
    sys.exit(run_stages(__doc__, "NeMo-RL", SOURCE, work))
