"""A stage's iteration on a GPU that computes no numbers; test_fake_gpu.py runs it in a process.

Not collected by itself: a fake GPU changes torch for the whole process. Everything is the project's
and Megatron's own: flags, model, DDP, feed, executor, store, hooks, torch's flash kernel. Left out,
as no kernel of theirs can be asked here: Transformer Engine, apex, NCCL (whose collectives do
nothing to tensors of the right shape), the self-test of attention, which compares numbers.
"""

import math
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from tests.rehearsal.fake_gpu import DEVICE, DeviceError, FakeGpu, install

gpu: FakeGpu = install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed._tools.fake_collectives  # noqa: E402  their shapes
from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core.num_microbatches_calculator import (  # noqa: E402
    destroy_num_microbatches_calculator,
)
from megatron.core.rerun_state_machine import destroy_rerun_state_machine  # noqa: E402
from megatron.training import argument_utils, global_vars  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.testing._internal.distributed import fake_pg  # noqa: E402, F401  the back end "fake"

from megatron_epp.ir import SELECTIVE, Op, Plan, check, slices_of  # noqa: E402
from megatron_epp.layers.attention import varlen  # noqa: E402
from megatron_epp.layers.attention.flash import FlashKernel  # noqa: E402
from megatron_epp.layers.chunk_state import chunk_rows  # noqa: E402
from megatron_epp.mcore.data.chunk_batches import ChunkBatchBuilder  # noqa: E402
from megatron_epp.mcore.data.row_shard import RowShard  # noqa: E402
from megatron_epp.mcore.kinds.attention.module import ElasticAttention  # noqa: E402
from megatron_epp.mcore.lm_head.fused_head import block_tokens  # noqa: E402
from megatron_epp.mcore.loops.adapters.token_samples import on_this_device  # noqa: E402
from megatron_epp.mcore.loops.slice_stage import SliceStage  # noqa: E402
from megatron_epp.mcore.model import (  # noqa: E402
    attention,
    forward,
)
from megatron_epp.mcore.model.layer_spec import fix_layer_spec  # noqa: E402
from megatron_epp.runtime import host_store  # noqa: E402
from megatron_epp.runtime.kv_store import Store  # noqa: E402
from scripts.bench import single_stage  # noqa: E402
from tests.mcore.fault_injection import fault  # noqa: E402

LAYERS, HIDDEN, HEADS, GROUPS, CONTEXT = 2, 64, 8, 2, 8192
# Megatron's own layers on a GPU without NVIDIA apex.
FLAGS = f"""
    --num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size 128 --swiglu
    --num-attention-heads {HEADS} --group-query-attention --num-query-groups {GROUPS}
    --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --seq-length {CONTEXT} --max-position-embeddings {CONTEXT} --micro-batch-size 1
    --global-batch-size 4 --train-iters 1 --lr 1e-4 --eval-iters 0
    --tokenizer-type NullTokenizer --vocab-size 511 --bf16
    --transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion
    --no-bias-dropout-fusion --no-bias-swiglu-fusion --no-gradient-accumulation-fusion
"""

# Split, hybrid and packed chunks; every letter. The last chunk has more rows than a block of the
# head, and the first slice is one token.
DOCUMENTS = """\
plan v1
replica 0 of 1
documents 700 120 90 5000 40
layers 2 2 2
chunk 0: 0[0:1]
chunk 1: 1[0:120] 0[1:500]
chunk 2: 0[500:700] 2[0:90]
chunk 3: 3[0:5000] 4[0:40]
"""
PLANS = {
    "whole backwards": (
        "1k1f 1n1m 1c1a 1b1k",
        "F0 F1 F2 F3 B2 B3 B1 B0",
    ),
    "split backwards": (
        "1a1b 1f1c 1m1k 1n1f",
        "F0 F1 F2 I2 F3 I1 W2 I0 I3 W1 W3 W0",
    ),
    "both": (
        "1c1m 1b1n 1f1a 1k1c",
        "F0 F1 F2 B2 I1 F3 W1 B0 I3 W3",
    ),
    "offloaded": (
        "2o 1o1f 1k1o 1c1o",
        "F0 F1 F2 B2 I1 F3 W1 B0 I3 W3",
    ),
    "evaluation": ("2k 2o 2k 2k", "F0 F1 F2 F3"),
}


def plan_of(kind: str) -> Plan:
    letters, order = PLANS[kind]
    text = DOCUMENTS + "".join(f"recompute {stage}: {letters}\n" for stage in range(3))
    plan = Plan.parse(text + "".join(f"stage {stage}: {order}\n" for stage in range(3)))
    check(plan)
    return plan


@contextmanager
def world_of(tensor: int, context: int) -> Iterator[single_stage.SingleProcess]:
    """The first rank of a world of ``tensor`` x ``context`` ranks, as far as Megatron can tell."""
    ranks = tensor * context
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", ranks)):
            patch.setitem(os.environ, name, str(value))
        patch.setattr("sys.argv", ["pretrain_gpt.py"])
        begin, group = dist.init_process_group, dist.new_group
        store = dist.HashStore()
        patch.setattr(
            dist,
            "init_process_group",
            lambda **kwargs: begin("fake", store=store, rank=0, world_size=kwargs["world_size"]),
        )
        patch.setattr(dist, "new_group", lambda ranks=None, **kwargs: group(ranks))
        patch.setattr(attention, "require_right", lambda *given: None)
        described = argument_utils.gpt_config_from_args

        def description(args: Any) -> Any:
            made = described(args)
            if args.context_parallel_size > 1:
                fix_layer_spec(made)
            return made

        patch.setattr(argument_utils, "gpt_config_from_args", description)
        flags = FLAGS + f"--tensor-model-parallel-size {tensor} --context-parallel-size {context}"
        alone = single_stage.start_single_process(flags.split())
        assert alone.device == DEVICE and alone.attention.name == "torch"
        try:
            yield alone
        finally:
            global_vars.destroy_global_vars()
            destroy_num_microbatches_calculator()
            destroy_rerun_state_machine()
            mpu.destroy_model_parallel()
            dist.destroy_process_group()


ALONE, SPREAD = (1, 1), (2, 2)  # tensor- and context-parallel ranks


@pytest.fixture(scope="module")
def world(request) -> Iterator[single_stage.SingleProcess]:
    with world_of(*request.param) as alone:
        yield alone


def attentions(plan: Plan, stage: int) -> tuple[int, int]:
    """Calls of the kernel's forward and backward that ``stage`` makes."""
    slices, forwards, backwards = slices_of(plan), 0, 0
    for chunk in range(len(plan.chunks)):
        rows = chunk_rows(plan, slices, chunk)
        whole = [r.cut for r in rows]
        pieces = sum(whole) + sum(
            1 for at, cut in enumerate(whole) if not cut and (at == 0 or whole[at - 1])
        )
        for letter in plan.recompute[stage][chunk]:
            again = letter == "f" or "core_attn" in SELECTIVE.get(letter, ())
            forwards += pieces * (1 + (again and not plan.forward_only))
            backwards += pieces * (not plan.forward_only)
    return forwards, backwards


def run(alone: single_stage.SingleProcess, model: Any, plan: Plan, stage: int) -> Counter[str]:
    """Ops that an iteration of ``stage`` asks the device for; none makes the host wait."""
    before = gpu.calls.copy()
    with gpu.without_waiting(), torch.set_grad_enabled(not plan.forward_only):
        records = single_stage.run_stage(alone, model, plan, stage).records
    done = [record.op for record in records if isinstance(record.op, Op)]
    assert done == list(plan.orders[stage])
    return gpu.calls - before


@pytest.mark.parametrize(
    ("world", "stage", "kinds"),
    [
        (ALONE, 0, ("both",)),
        (ALONE, 1, ("whole backwards", "split backwards", "offloaded")),
        (ALONE, 2, ("both", "evaluation")),
        (SPREAD, 0, ("both",)),
        (SPREAD, 2, ("split backwards", "offloaded")),
    ],
    indirect=["world"],
)
def test_a_stage_computes_every_kind_of_chunk(world, stage, kinds) -> None:
    model = single_stage.build_stage(world, LAYERS, stage == 0, stage == 2)
    gradients: Counter[str] = Counter()
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        assert parameter.device == DEVICE and parameter.dtype == torch.bfloat16, name

        def count(parameter: Any, name: str = name) -> None:
            gradients[name] += 1

        parameter.register_post_accumulate_grad_hook(count)
    for kind in kinds:
        plan = plan_of(kind)
        gradients.clear()
        calls = run(world, model, plan, stage)
        found = calls["_flash_attention_forward"], calls["_flash_attention_backward"]
        assert found == attentions(plan, stage), kind
        # Each parameter's gradient once a chunk; that of the output layer once a block of rows.
        chunks = () if plan.forward_only else plan.chunks
        parts, block = world.args.context_parallel_size, block_tokens(world.args)
        blocks = sum(math.ceil(chunk.tokens / parts / block) for chunk in chunks)
        for name in named:
            assert gradients[name] == (blocks if "output_layer" in name else len(chunks)), name
        for name, parameter in named.items():
            assert parameter.main_grad.dtype == torch.float32, name
            assert parameter.main_grad.device == DEVICE, name


# ------------------------------------------------------------------ would it see a break?

BROKEN_PLAN = """\
plan v1
replica 0 of 1
documents 30 9
layers 2
chunk 0: 0[0:20]
chunk 1: 0[20:30] 1[0:9]
recompute 0: 1k1o 1n1k
stage 0: F0 F1 B1 B0
"""


def positions_stay(tensor, builder: ChunkBatchBuilder, array: Any) -> Tensor:
    is_positions = array.dtype.kind == "i" and array.flat[0] == 0
    return torch.from_numpy(array) if is_positions else tensor(builder, array)


def most_of_all(of: Any, queries: Any, keys: Any, device: Any) -> varlen.CuSeqlens:
    sums = varlen._sums(queries, device), varlen._sums(keys, device)
    return varlen.CuSeqlens(*sums, sum(queries) + 1, sum(keys) + 1)


def store_in_float32(append, store: Store, layer: int, document: int, start: int, k, v) -> None:
    append(store, layer, document, start, k.float(), v.float())


def loss_is_read(chunk_loss, mask: Tensor, losses: Tensor) -> Any:
    assert float(losses.sum()) >= 0
    return chunk_loss(mask, losses)


def mask_as_index(chunk_loss, mask: Tensor, losses: Tensor) -> Any:
    losses.view(-1)[mask.view(-1) > 0]
    return chunk_loss(mask, losses)


# Faults, and what is said of them.
BREAKS = (
    (fault(ChunkBatchBuilder, "_tensor", positions_stay), "two different devices cuda:0, cpu"),
    (
        fault(varlen, "on_device", lambda on_device, tensor, device: tensor),
        "two different devices|the borders",
    ),
    (
        fault(varlen, "on_device", lambda on_device, tensor, to: on_device(tensor.long(), to)),
        "the flash kernel takes no such call: the borders",
    ),
    (
        fault(varlen, "on_device", lambda on_device, tensor, device: tensor.to(device)),
        "to the device from unpinned memory",
    ),
    (
        fault(
            varlen, "_sums", lambda sums, lengths, device: sums([n + 1 for n in lengths], device)
        ),
        "for 20 rows",
    ),
    (fault(varlen.CuSeqlens, "of", most_of_all), "said to be at most 21"),
    (fault(Store, "append", store_in_float32), "torch.float32 beside torch.bfloat16"),
    (
        fault(
            FlashKernel,
            "backward",
            lambda plain, self, grad, *call: plain(self, grad.float(), *call),
        ),
        "torch.float32 beside torch.bfloat16",
    ),
    (
        fault(
            ElasticAttention,
            "__call__",
            lambda plain, self, q, *call, **named: plain(self, q.float(), *call, **named),
        ),
        "the flash kernel takes no such call: torch.float32",
    ),
    (fault(forward, "chunk_loss", loss_is_read), "_local_scalar_dense"),
    (fault(forward, "chunk_loss", mask_as_index), "the host waits for a mask"),
    (
        fault(
            forward, "chunk_loss", lambda plain, mask, losses: plain(mask.cpu().to(DEVICE), losses)
        ),
        "a copy to the host, for which it waits",
    ),
    (
        lambda: patch.object(host_store._Streams, "pinned", False),
        "a copy to the host, for which it waits",
    ),
    (
        fault(Tensor, "copy_", lambda copy, self, source, non_blocking=False: copy(self, source)),
        "a copy between host and device, for which the host waits",
    ),
)


@pytest.mark.parametrize("world", [ALONE], indirect=True)
def test_what_breaks_on_a_gpu_breaks_here(world) -> None:
    plan = Plan.parse(BROKEN_PLAN)
    model = single_stage.build_stage(world, LAYERS, True, True)
    run(world, model, plan, 0)
    for inject, says in BREAKS:
        with inject(), pytest.raises((DeviceError, RuntimeError), match=says):
            run(world, model, plan, 0)
    run(world, model, plan, 0)


@pytest.mark.parametrize("world", [ALONE], indirect=True)
def test_slices_of_loops_reach_the_device_without_a_wait(world) -> None:
    plan = Plan.parse(BROKEN_PLAN)
    model = torch.nn.Linear(2, 2).to(DEVICE)
    stage = SimpleNamespace(
        row_shard=RowShard(), plan=plan, stage=0, store=Store({0: 8}, {0: 8}), training=True,
        model=model, _slices=slices_of(plan), _router_stats=None,
    )  # fmt: skip
    with gpu.without_waiting():
        params = SliceStage._params(stage, 0)
        rows = on_this_device({"tokens": torch.ones(3, dtype=torch.int64), "positions": None})
    assert params.positions.device == rows["tokens"].device == DEVICE
    assert rows["positions"] is None
    with gpu.without_waiting(), pytest.raises(DeviceError, match="from unpinned memory"):
        torch.ones(3).to(DEVICE, non_blocking=True)  # the guard can fail
