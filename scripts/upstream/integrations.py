#!/usr/bin/env python3
# ruff: noqa: E402  (run from anywhere: this checkout is put on the path first)
"""Comparison of this package's readers of micro-batches with the frameworks' own packing code.

    scripts/upstream/integrations.py --framework verl                    # what pip installed
    git clone --depth 1 https://github.com/verl-project/verl
    scripts/upstream/integrations.py --framework verl --checkout verl

The script executes only the packing functions of the installed framework, or of a checkout, on
random documents, for several degrees and settings. Parallel ranks are simulated, nothing else of
the framework is imported, and none of its code is copied into this project. The number of rows of
one rank, times the number of ranks, must equal that of this package's reader. The script prints a
line for each difference, and a summary; it fails if there is a difference. If the functions of a
release cannot be run in this way, it prints one line and ends with status 2.
"""

import ast
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import numpy
import torch
from framework_runs import found_in
from torch.nn import functional

from megatron_epp.frameworks.caller import Caller
from megatron_epp.frameworks.known import FRAMEWORKS

CASES = 60
DEGREES = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4), (4, 2))  # tensor-, context-parallel


@dataclass(frozen=True)
class Ranks:
    tp: int
    cp: int

    @property
    def mpu(self) -> Any:
        """Substitute for Megatron's parallel state on the first rank, for packing functions."""
        return SimpleNamespace(
            get_tensor_model_parallel_world_size=lambda: self.tp,
            get_context_parallel_world_size=lambda: self.cp,
            get_context_parallel_rank=lambda: 0,
        )


def functions_of(checkout: Path, file: str, *names: str, **known: Any) -> SimpleNamespace:
    """Return the functions ``names`` of a file, which see only ``known`` and each other.

    Raises:
        ValueError: if the file or a function does not exist.
    """
    path = checkout / file
    if not path.exists():
        raise ValueError(f"--checkout {checkout}: holds no {file}")
    nodes = {
        node.name: node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name in names
    }
    missing = [name for name in names if name not in nodes]
    if missing:
        raise ValueError(f"{path}: has no {', '.join(missing)} any more")
    place: dict[str, Any] = {
        "torch": torch, "F": functional, "math": math, "np": numpy,
        "PackedSeqParams": lambda **named: SimpleNamespace(**named), **known,
    }  # fmt: skip
    for node in nodes.values():
        node.decorator_list = []
    source = ast.Module(
        [ast.parse("from __future__ import annotations").body[0], *nodes.values()], []
    )
    exec(compile(ast.fix_missing_locations(source), str(path), "exec"), place)
    return SimpleNamespace(**{name: place[name] for name in names})


def forward_step(package: str, **brought: Any) -> Callable[..., Any]:
    """Return a forward step that appears to be of ``package``, with the same closure variables."""
    self, args = brought.get("self"), brought.get("args")

    def step(data_iterator: Any, model: Any) -> Any:
        return self, args

    step.__module__ = package
    return step


# What is compared: (its micro-batch, its forward step, fields of config, rows of all ranks by it)
Case = tuple[Any, Callable[..., Any], dict[str, Any], int]


def lengths(random: Random) -> list[int]:
    return [
        max(1, min(3000, int(random.lognormvariate(5, 1.3)))) for _ in range(random.randint(1, 7))
    ]


def samples(of: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [B, S] padded on the right, and their mask."""
    mask = torch.arange(max(of))[None] < torch.tensor(of)[:, None]
    return torch.ones(mask.shape, dtype=torch.long), mask


# ------------------------------------------------------------------ a framework each


def verl(checkout: Path, ranks: Ranks, random: Random) -> Case:
    its = functions_of(
        checkout, "verl/models/mcore/util.py", "preprocess_thd_engine", "preprocess_bshd_engine",
        "_compute_fp8_thd_align_size", mpu=ranks.mpu,
        preprocess_for_mindspeed=lambda *any: None, _packed_seq_params_supports=lambda name: False,
        _PACKED_SEQ_PARAMS_HAS_CP_PARTITION_MODE=False, is_npu_available=False,
    )  # fmt: skip
    fp8, bucket = random.choice((None, "e4m3")), random.choice((None, 512))
    packed = random.random() < 0.7
    tokens = [torch.ones(length, dtype=torch.long) for length in lengths(random)]
    nested = torch.nested.nested_tensor(tokens, layout=torch.jagged)
    settings = SimpleNamespace(
        use_remove_padding=packed, pad_to_length=bucket is not None, pad_to_length_bucket=bucket
    )
    step = forward_step("verl.workers", self=SimpleNamespace(engine_config=settings))
    if packed:  # borders alone: its copying fails where what pads a pack exceeds its last document
        _, params, _ = its.preprocess_thd_engine(
            nested, pre_process=False, use_fp8_padding=fp8 is not None, pad_to_length_bucket=bucket
        )
        rows = int(params.cu_seqlens_q_padded[-1])
    else:
        made = its.preprocess_bshd_engine(nested, use_fp8_padding=fp8 is not None)[0]
        rows = made.shape[1] * ranks.cp
    return {"input_ids": nested}, step, {"fp8": fp8}, rows


class _Source:
    """Substitute for the DataIterator of slime and miles."""

    def __init__(self, tokens: list[torch.Tensor], longest: int):
        ones = [torch.ones(1) for _ in tokens]
        self.rollout_data = {
            "tokens": tokens, "loss_masks": ones, "response_lengths": [1] * len(tokens),
            "total_lengths": [len(one) for one in tokens], "max_seq_lens": [longest] * len(tokens),
        }  # fmt: skip

    def get_next(self, keys: Any) -> dict[str, Any]:
        return {key: self.rollout_data.get(key) for key in keys}


KEYS = ("tokens", "loss_masks", "total_lengths", "response_lengths", "max_seq_lens")


def slime(checkout: Path, ranks: Ranks, random: Random) -> Case:
    folder = "slime/backends/megatron_utils"
    slices = functions_of(checkout, f"{folder}/cp_utils.py", "slice_with_cp", mpu=ranks.mpu,
                          Callable=Callable)  # fmt: skip
    device = SimpleNamespace(device=lambda: "cpu", current_device=lambda: "cpu")
    its = functions_of(checkout, f"{folder}/data.py", "get_batch", mpu=ranks.mpu,
                       accelerator=device, slice_with_cp=slices.slice_with_cp)  # fmt: skip
    multiple, gathered = random.choice((1, 16, 128)), random.random() < 0.3
    source = _Source([torch.ones(length, dtype=torch.long) for length in lengths(random)], 0)
    args = SimpleNamespace(data_pad_size_multiplier=multiple, allgather_cp=gathered)
    made = its.get_batch(source, KEYS, multiple, gathered)["tokens"]
    return source, forward_step("slime.x", args=args), {}, made.shape[1] * ranks.cp


def miles(checkout: Path, ranks: Ranks, random: Random) -> Case:
    folder = "miles/backends/training_utils"
    state = SimpleNamespace(
        tp=SimpleNamespace(size=ranks.tp), cp=SimpleNamespace(size=ranks.cp, rank=0)
    )
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *any, **named: self  # type: ignore[method-assign,assignment]
    slices = functions_of(checkout, f"{folder}/cp_utils.py", "slice_with_cp",
                          get_parallel_state=lambda: state, Callable=Callable)  # fmt: skip
    its = functions_of(
        checkout, f"{folder}/data.py", "get_batch", get_parallel_state=lambda: state,
        slice_with_cp=slices.slice_with_cp,
        expand_multimodal_rollout_data_in_place=lambda *any, **named: None,
    )  # fmt: skip
    multiple, form = random.choice((1, 16, 128)), random.choice(("thd", "thd", "bshd"))
    gathered = form == "thd" and random.random() < 0.3
    of = lengths(random)
    longest = -(-max(of) // (ranks.tp * multiple)) * ranks.tp * multiple
    source = _Source([torch.ones(length, dtype=torch.long) for length in of], longest)
    args = SimpleNamespace(
        data_pad_size_multiplier=multiple, allgather_cp=gathered, qkv_format=form
    )
    made = its.get_batch(source, KEYS, multiple, form, allgather_cp=gathered)["tokens"]
    return source, forward_step("miles.x", args=args), {}, made.shape[1] * ranks.cp


def swift(checkout: Path, ranks: Ranks, random: Random) -> Case:
    its = functions_of(checkout, "swift/utils/transformers_utils.py", "get_packed_seq_params")
    places = torch.cat([torch.arange(length) for length in lengths(random)])[None]
    batch = {"input_ids": torch.ones_like(places), "position_ids": places}
    step = forward_step(
        "swift.megatron", self=SimpleNamespace(args=SimpleNamespace(padding_free=True))
    )
    boundaries = its.get_packed_seq_params(places)["cu_seq_lens_q"]
    read = reader_for("ms-swift", ranks, step, {})(batch)
    assert list(read.documents) == boundaries.diff().tolist(), "documents differ"
    return batch, step, {}, int(boundaries[-1])


def bridge(checkout: Path, ranks: Ranks, random: Random) -> Case:
    folder = "megatron/bridge/training/utils"
    names = ("get_packed_seq_params", "_squeeze_metadata", "_as_python_int")
    its = functions_of(checkout, f"{folder}/packed_seq_utils.py", *names)
    boundaries = torch.tensor([0, *lengths(random)]).cumsum(0).int()
    rows = int(boundaries[-1])
    name = random.choice(("cu_seqlens_q", "cu_seqlens"))
    told = functional.pad(boundaries, (0, 3), value=-1) if name == "cu_seqlens" else boundaries
    batch = {"tokens": torch.ones(1, rows), name: told[None], "max_seqlen": torch.tensor([rows])}
    step = forward_step("megatron.bridge.training.gpt_step")
    params = its.get_packed_seq_params({**batch, name: told})
    read = reader_for("Megatron-Bridge", ranks, step, {})(batch)
    assert list(read.documents) == params.cu_seqlens_q.diff().tolist(), "documents differ"
    return batch, step, {}, rows


def nemo_rl(checkout: Path, ranks: Ranks, random: Random) -> Case:
    its = functions_of(
        checkout, "nemo_rl/models/megatron/data.py", "_pack_sequences_for_megatron",
        _round_up_to_multiple=lambda size, unit: -(-size // unit) * unit,
        _get_tokens_on_this_cp_rank=lambda one, rank, size, seq_dim: one[: len(one) // size],
    )  # fmt: skip
    of = lengths(random)
    tokens, _ = samples(of)
    each = 2 * ranks.cp * ranks.tp
    whole, mine, _, _, padded = its._pack_sequences_for_megatron(
        tokens, torch.tensor(of), each, random.choice((1, 16 * each)), cp_size=ranks.cp
    )
    batch = SimpleNamespace(input_ids=whole, cu_seqlens_padded=padded)
    return batch, forward_step("nemo_rl.models"), {}, mine.shape[1] * ranks.cp


def skyrl(checkout: Path, ranks: Ranks, random: Random) -> Case:
    folder = "skyrl/backends/skyrl_train/distributed/megatron"
    recipes = functions_of(checkout, f"{folder}/quantization_utils.py", "is_mxfp8_recipe")
    sizes = functions_of(
        checkout, f"{folder}/packing_utils.py", "get_packed_seq_align_size",
        "get_unpacked_seq_align_size", "_fp8_token_align", AUTO_FP8_RECIPE="auto", **vars(recipes)
    )  # fmt: skip
    its = functions_of(checkout, f"{folder}/megatron_utils.py", "preprocess_packed_seqs",
                       "remove_left_padding", mpu=ranks.mpu, **vars(sizes))  # fmt: skip
    of, fp8 = lengths(random), random.choice((None, "hybrid"))
    recipe = random.choice(("blockwise", "mxfp8", None))
    quantised = {"fp8_enabled": fp8 is not None, "fp8_recipe": recipe}
    packed = ranks.cp > 1 or random.random() < 0.6
    tokens, mask = samples(of)
    step = forward_step("skyrl.x", self=SimpleNamespace(remove_microbatch_padding=packed))
    if packed:
        made = its.preprocess_packed_seqs(tokens, mask, **quantised)[0]
    else:
        made = its.remove_left_padding(tokens, mask, tokens, **quantised)[0]
    batch = {"sequences": tokens, "attention_mask": mask}
    return batch, step, {"fp8": fp8, "fp8_recipe": recipe}, made.shape[1] * ranks.cp


def areal(checkout: Path, ranks: Ranks, random: Random) -> Case:
    align = functions_of(checkout, "areal/utils/math.py", "align", "ceil_div").align
    pad = functions_of(checkout, "areal/utils/data.py", "pack_tensor_dict",
                       "pad_packed_tensor_dict", align=align, N_TOKENS_PER_PAGE=256)  # fmt: skip
    its = functions_of(checkout, "areal/engine/megatron_utils/packed_context_parallel.py",
                       "preprocess_packed_seqs_context_parallel", mpu=ranks.mpu)  # fmt: skip
    of = lengths(random)
    tokens, mask = samples(of)
    packed = pad.pack_tensor_dict({"input_ids": tokens, "attention_mask": mask.long()})
    each = ranks.tp * (2 * ranks.cp if ranks.cp > 1 else 1)
    padded = pad.pad_packed_tensor_dict(packed, align(sum(of), 256), seq_align_to=each)[0]
    made = its.preprocess_packed_seqs_context_parallel(padded["input_ids"], padded["cu_seqlens"])[0]
    item = SimpleNamespace(padded_mb=padded)
    return item, forward_step("areal.engine"), {}, made.shape[1] * ranks.cp


def roll(checkout: Path, ranks: Ranks, random: Random) -> Case:
    its = functions_of(
        checkout, "roll/distributed/strategy/megatron_strategy.py", "_pack_sequences",
        "_get_pad_factor", mpu=ranks.mpu, current_platform=SimpleNamespace(device_type="cpu"),
    )  # fmt: skip
    tokens, mask = samples(lengths(random))
    strategy = SimpleNamespace(
        use_sequence_packing=True,
        _get_feature_on_this_cp_rank=lambda one, name: one[:, : one.shape[1] // ranks.cp],
    )
    strategy._get_pad_factor = partial(its._get_pad_factor, strategy)
    made = its._pack_sequences(strategy, tokens, mask.long())[0]
    batch = SimpleNamespace(batch={"input_ids": tokens, "attention_mask": mask})
    return batch, forward_step("roll.x", self=strategy), {}, made.shape[1] * ranks.cp


PACKING: dict[str, Callable[[Path, Ranks, Random], Case]] = {
    "verl": verl, "slime": slime, "miles": miles, "ms-swift": swift, "Megatron-Bridge": bridge,
    "NeMo-RL": nemo_rl, "SkyRL": skyrl, "AReaL": areal, "ROLL": roll,
}  # fmt: skip


# ------------------------------------------------------------------ compared


def reader_for(name: str, ranks: Ranks, step: Any, config: dict[str, Any]) -> Callable[[Any], Any]:
    (framework,) = (one for one in FRAMEWORKS if one.name == name)
    made = framework.reader(Caller(step, SimpleNamespace(**config), ranks.tp, ranks.cp))
    assert made is not None, f"{name}: its reader cannot tell"
    return made


def differences(name: str, checkout: Path) -> Iterator[str]:
    for tp, cp in DEGREES:
        ranks, random = Ranks(tp, cp), Random(100 * tp + cp)
        for number in range(CASES):
            place = f"tp {tp}, cp {cp}, case {number}"
            try:
                batch, step, config, rows = PACKING[name](checkout, ranks, random)
                read = reader_for(name, ranks, step, config)(batch)
            except AssertionError as error:  # of ours: what was read beside the rows
                yield f"{place}: {error}"
                continue
            except (ValueError, OSError):
                raise
            except Exception as error:  # a release that asks its helpers for something else
                said = f"{type(error).__name__}: {error}"
                raise ValueError(
                    f"{checkout}: {place}: what {name} packs with cannot be run alone: {said}; "
                    "its packing code has moved: scripts/upstream/canary.py names what"
                ) from error
            if read is None or read.rows != rows:
                told = None if read is None else read.rows
                yield f"{place}: {rows} rows by {name}, {told} by ours"


def main() -> int:
    known = {name: partial(differences, name) for name in PACKING}
    framework, found = found_in(__doc__, known, installed=True)
    for line in found[:10]:
        print(line)
    count = len(DEGREES) * CASES
    print(f"{framework}: {count - len(found)} of {count} micro-batches as its own code packs")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
