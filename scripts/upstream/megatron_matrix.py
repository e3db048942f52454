#!/usr/bin/env python3

"""Slices in external training loops, with the Megatrons of frameworks: random plans.

    scripts/upstream/megatron_matrix.py                              # every release in MEGATRONS
    scripts/upstream/megatron_matrix.py --megatron 0.16.1 main=PATH  # some; a checkout by its path

A wheel of megatron-core is installed in a separate folder, which precedes this environment's
packages, without dependencies, so that only Megatron differs. Four processes run a small GPT in
float64, wrapped in Megatron's DDP, as two pipeline stages with one or two tensor-parallel ranks
(CASES). A loop calls the function that get_forward_backward_func returns, in training and in
forward-only passes: with Megatron's schedule, and then attached, in random valid plans of slices
and of whole micro-batches. Megatron runs padded samples; plans also run the same documents
packed into one row. Finally, a model that a release cannot slice is attached. The script prints a
line for each release, and fails if a gradient or a loss differs by more than 1e-12, if no plan ran,
or if the refusal is missing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

MEGATRONS = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")
STAGES, RANKS, WORDS, CONTEXT, HIDDEN, BATCHES, CALLS, TOLERANCE = 2, 4, 62, 48, 32, 4, 3, 1e-12


@dataclass(frozen=True)
class Case:
    """Model and micro-batches of one comparison; ``since`` is the first release that slices it.

    Megatron computes router losses of padding, too; with them, a micro-batch is one document.
    """

    name: str
    tensor: int = 1
    moe: bool = False
    mla: bool = False
    packed: bool = False
    router_losses: bool = False
    since: tuple[int, int] = (0, 16)


CASES = (
    Case("padded"),
    Case("packed, tensor parallel", tensor=2, packed=True),
    Case("MoE, padded, tensor parallel", tensor=2, moe=True),
    Case("MoE, packed", moe=True, packed=True, router_losses=True),
    Case("MLA, packed", mla=True, packed=True, since=(0, 19)),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megatron", nargs="+", default=MEGATRONS, metavar="RELEASE|NAME=PATH")
    parser.add_argument("--folder", type=Path, default=ROOT / ".megatrons", help="of the wheels")
    given = parser.parse_args()
    failed = []
    print(f"{'Megatron':<12} {'calls':>5} {'chunks':>6} {'worst':>8}  refused")
    for name in given.megatron:
        name, _, path = name.partition("=")
        answers = run(Path(path).resolve() if path else wheel(name, given.folder))
        calls, chunks = (max(answer[key] for answer in answers) for key in ("calls", "chunks"))
        worst = max(answer["worst"] for answer in answers)
        refused = answers[0]["refused"]
        fine = worst <= TOLERANCE and all(a["planned"] == 2 * calls for a in answers)
        fine &= chunks > calls * BATCHES and all(len(a["refused"]) == len(refused) for a in answers)
        print(f"{name:<12} {calls:>5} {chunks:>6} {worst:>8.1e}  {'; '.join(refused)}", flush=True)
        failed += [] if fine else [name]
    if failed:
        print(f"failed: {' '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def wheel(release: str, folder: Path) -> Path:
    """Return the folder of the installed wheel; for this environment's release, ROOT."""
    if version("megatron-core") == release:
        return ROOT
    place = folder / release
    if not (place / "megatron" / "core").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        asked = ["--no-deps", "--target", str(place), f"megatron-core=={release}"]
        subprocess.run([*pip, *asked], check=True)
    return place


def run(megatron: Path) -> list[dict]:
    """Return the answer of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(RANKS), "--no-python", sys.executable, __file__]
        done = subprocess.run(
            [*command, "--rank", folder],
            env=os.environ | {"PYTHONPATH": f"{megatron}:{ROOT}", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        answers = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    if done.returncode or len(answers) != RANKS:
        raise SystemExit(f"{megatron}: the loop ended with status {done.returncode}\n{done.stdout}")
    return answers


# ------------------------------------------------------------------ a rank, under torchrun


def rank(folder: Path) -> None:
    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()

    import megatron.core
    import torch
    import torch.distributed as dist

    from megatron_epp.mcore.patching.releases import numbers_of

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    answer = {"calls": 0, "planned": 0, "chunks": 0, "worst": 0.0, "refused": []}
    with cpu_host.double_precision():
        for case in CASES:
            parallel(case)
            if numbers_of(megatron.core.__version__) < case.since:
                answer["refused"].append(refusal(case))
                continue
            for key, value in compared(case).items():
                answer[key] = max(answer[key], value) if key == "worst" else answer[key] + value
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(answer))
    dist.barrier()


def parallel(case: Case) -> None:
    """Build Megatron's process groups for ``case``."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(case.tensor, STAGES)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)


def refusal(case: Case) -> str:
    """Return the message with which a model is refused that has MLA in its first layer."""
    import torch
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    import megatron_epp

    # Old releases cannot build MLA without Transformer Engine.
    layer, model = MLASelfAttention.__new__(MLASelfAttention), build_model(CASES[0], False)
    torch.nn.Module.__init__(layer)
    model.module.decoder.layers[0].self_attention = layer
    try:
        megatron_epp.attach(model, adapter(case))
    except ValueError as refused:
        return str(refused)
    raise SystemExit(f"{case.name}: attached, although its release is older than {case.since}")


def compared(case: Case) -> dict:
    """Return what this rank counted and compared for ``case``."""
    from megatron.core.pipeline_parallel import schedules

    from megatron_epp.mcore.loops.attached import attach_to
    from megatron_epp.mcore.loops.install import Installation
    from megatron_epp.mcore.loops.settings import Settings

    worst, calls, planned = 0.0, 0, []
    for per_token in (False, True):
        model = build_model(case, per_token)
        stock = every_call(model, case, False, per_token)
        made = attach_to(model, adapter(case))
        settings = Settings(observe=planned.append, make_plans=random_plans())
        with Installation(settings):
            sliced = every_call(model, case, case.packed, per_token)
            made.slicing = False
            whole = every_call(model, case, case.packed, per_token)
        assert not hasattr(schedules.forward_backward_no_pipelining, "__megatron_epp__")
        worst = max(worst, difference(sliced, stock), difference(whole, stock))
        calls += len(stock)
    chunks = sum(len(record.plan.chunks) for record in planned[:CALLS])
    return {"calls": calls, "planned": len(planned), "chunks": chunks, "worst": worst}


def difference(ours: list, stock: list) -> float:
    """Return the largest difference of losses and gradients.

    Differences of gradients are relative to the largest element of the tensor.
    """
    found = []
    for (losses, gradients), (own_losses, own_gradients) in zip(ours, stock, strict=True):
        assert gradients.keys() == own_gradients.keys()
        found += [abs(a - b) for a, b in zip(losses, own_losses, strict=True)]
        found += [
            float((gradients[name] - own).abs().max() / own.abs().max().clamp(min=1e-9))
            for name, own in own_gradients.items()
        ]
    return max(found)


def random_plans():
    """Return a function that makes random plans of slices or micro-batches, for ``Settings``."""
    from megatron_epp.ir import FULL, KEEP
    from tests.certify.loops.micro_batches import arbitrary_sliced_plans

    random = Random(0)

    def draw(calls, layers, rates, options, forward_only):
        return arbitrary_sliced_plans(
            calls, layers, random, False, forward_only, FULL + KEEP, options.cut
        )

    return draw


def adapter(case: Case):
    from megatron_epp.mcore.loops.adapters.packed import PackedDocuments
    from megatron_epp.mcore.loops.adapters.samples import Samples

    return PackedDocuments(loss) if case.packed else Samples(loss)


def build_model(case: Case, per_token: bool):
    """Return a stage as megatron.core loops build it, wrapped in DDP with one gradient buffer."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.moe import moe_utils

    from megatron_epp.mcore.kinds.mla.local import fix_local_mla

    # Without Transformer Engine, the router of 0.16 reads a name that it has not defined.
    moe_utils.__dict__.setdefault("te_general_gemm", None)
    mixed = {
        "num_moe_experts": 4, "moe_router_topk": 2, "moe_router_load_balancing_type": "none",
        "moe_ffn_hidden_size": 24, "moe_grouped_gemm": False,
    } if case.moe else {}  # fmt: skip
    if case.router_losses:
        mixed |= {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2}
        mixed |= {"moe_z_loss_coeff": 1e-2}
    latent = {
        "multi_latent_attention": True, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 8, "v_head_dim": 8, "rope_type": "rope",
        "apply_rope_fusion": False,
    } if case.mla else {"num_query_groups": 2}  # fmt: skip
    config = (MLATransformerConfig if case.mla else TransformerConfig)(
        num_layers=4, hidden_size=HIDDEN, num_attention_heads=4,
        attention_dropout=0.0, hidden_dropout=0.0, add_bias_linear=False, normalization="RMSNorm",
        pipeline_model_parallel_size=STAGES, pipeline_dtype=torch.float64,
        tensor_model_parallel_size=case.tensor, sequence_parallel=case.tensor > 1,
        params_dtype=torch.float64, variable_seq_lengths=True, persist_layer_norm=False,
        calculate_per_token_loss=per_token, deallocate_pipeline_outputs=True,
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths asks for it
        **mixed, **latent,
    )  # fmt: skip
    experts = {"num_experts": 4, "moe_grouped_gemm": False} if case.moe else {}
    stage = parallel_state.get_pipeline_model_parallel_rank()
    spec = get_gpt_layer_local_spec(
        normalization="RMSNorm", multi_latent_attention=case.mla, **experts
    )
    if case.mla:
        fix_local_mla(spec.submodules, config)
    model = GPTModel(
        config, spec, WORDS, CONTEXT, pre_process=stage == 0, post_process=stage == STAGES - 1,
        position_embedding_type="rope", share_embeddings_and_output_weights=True,
    )  # fmt: skip
    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=False), model
    )
    config.no_sync_func = wrapped.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def every_call(model, case: Case, packed: bool, counts: bool) -> list[tuple[list[float], dict]]:
    """Return (losses, gradients) of each call: training and forward-only passes in turn.

    Each loss of a training call is a mean, or with ``counts`` a sum with its number of tokens.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    made = []
    for number in range(CALLS):
        forward_only = number % 2 == 1
        model.zero_grad_buffer()
        batches = micro_batches(number, counts, case.tensor, 1 if case.router_losses else 3)
        found = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=map(in_a_row, batches) if packed else batches,
            model=[model], num_microbatches=BATCHES, seq_length=CONTEXT, micro_batch_size=1,
            forward_only=forward_only,
        )  # fmt: skip
        losses = [float(item["loss"]) for item in found]
        gradients = {} if forward_only else {
            name: parameter.main_grad.clone() for name, parameter in model.named_parameters()
        }  # fmt: skip
        made.append((losses, gradients))
    return made


def micro_batches(number: int, counts: bool, multiple: int, most: int):
    """Yield BATCHES micro-batches of 1 to ``most`` padded samples [B, S].

    S is a multiple of ``multiple``.
    """
    import torch

    random, drawn = Random(number), torch.Generator().manual_seed(number)
    for _ in range(BATCHES):
        lengths = [random.randint(3, CONTEXT) for _ in range(random.randint(1, most))]
        rows = -(-max(lengths) // multiple) * multiple
        tokens = torch.randint(WORDS, (len(lengths), rows), generator=drawn)
        ends = torch.tensor(lengths)[:, None]
        yield {
            "tokens": tokens,
            "labels": torch.roll(tokens, -1, 1),
            "loss_mask": (torch.arange(rows)[None] < ends).double(),
            "lengths": lengths,
            "counts": counts,
        }


def in_a_row(batch):
    """Return the documents of a micro-batch packed into one row [1, T], without padding."""
    import torch

    row = {
        name: torch.cat([batch[name][b, :n] for b, n in enumerate(batch["lengths"])])[None]
        for name in ("tokens", "labels", "loss_mask")
    }
    ends = torch.tensor([0, *batch["lengths"]]).cumsum(0)
    return {**row, "cu_seqlens": ends, "counts": batch["counts"]}


def forward_step(iterator, model):
    import torch

    batch = next(iterator)
    length = batch["tokens"].shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    places = torch.arange(length)[None].expand(len(batch["tokens"]), -1)
    output = model(batch["tokens"], places, mask, labels=batch["labels"])
    return output, lambda output: loss(batch, output)


def loss(batch, losses):
    """Return a mean, or a sum with its number of tokens, and a report."""
    import torch

    total, tokens = (losses * batch["loss_mask"]).sum(), batch["loss_mask"].sum()
    if batch["counts"]:
        return total, tokens.to(torch.int), {"loss": total.detach()}
    return total / tokens, {"loss": total.detach()}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(Path(sys.argv[2]))
    else:
        sys.exit(main())
