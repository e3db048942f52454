#!/usr/bin/env python3

"""Scheduling mode (level 0) with the Megatrons of frameworks: random plans, and their schedule.

    scripts/upstream/megatron_matrix.py                              # every release in MEGATRONS
    scripts/upstream/megatron_matrix.py --megatron 0.16.1 main=PATH  # some; a checkout by its path
    scripts/upstream/megatron_matrix.py --tests CHECKOUT   # with the test_schedules.py of each, too

A wheel of megatron-core is installed in a separate folder, which precedes this environment's
packages, without dependencies, so that only Megatron differs. Two processes run the two stages of a
small GPT in float64 with tied embeddings, wrapped in Megatron's DDP. A loop calls the function that
get_forward_backward_func returns, with micro-batches of several lengths and of equal length, in
training and in forward-only passes. Every call runs with Megatron's schedule, and then with random
valid plans. Finally, one function that plans need gets another name. The script prints a line for
each release, and fails if a gradient or a loss differs by more than 1e-12, a plan did not run, or
the warning is missing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

MEGATRONS = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")
STAGES, WORDS, CONTEXT, HIDDEN, BATCHES, CALLS, TOLERANCE = 2, 61, 64, 32, 5, 4, 1e-12
SCHEDULE_TESTS = "tests/unit_tests/pipeline_parallel/test_schedules.py"
RENAMED = "check_first_val_step"
COLUMNS = "calls", "planned", "worst"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megatron", nargs="+", default=MEGATRONS, metavar="RELEASE|NAME=PATH")
    parser.add_argument("--folder", type=Path, default=ROOT / ".megatrons", help="of the wheels")
    parser.add_argument("--tests", type=Path, metavar="CHECKOUT", help="of Megatron-LM, with tags")
    given = parser.parse_args()
    failed = []
    print(f"{'Megatron':<12} {'calls':>5} {'by plans':>8} {'worst':>8}  a function renamed")
    for name in given.megatron:
        name, _, path = name.partition("=")
        place = Path(path).resolve() if path else wheel(name, given.folder)
        answers, said = run(place)
        calls, planned, worst = (max(answer[key] for answer in answers) for key in COLUMNS)
        lines = [line for line in said if "own schedule runs" in line]
        alone = len(lines) == 1 and RENAMED in lines[0] and not any(a["lacking"] for a in answers)
        fine = alone and worst <= TOLERANCE and all(a["planned"] == calls for a in answers)
        words = "one warning, Megatron's own schedule" if alone else f"{lines} {answers}"
        print(f"{name:<12} {calls:>5} {planned:>8} {worst:>8.1e}  {words}", flush=True)
        if given.tests is not None:
            fine &= own_tests(name, place, given.tests)
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


def environment(megatron: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{megatron}:{ROOT}", "OMP_NUM_THREADS": "1"}


def run(megatron: Path) -> tuple[list[dict], list[str]]:
    """Return the answer of each stage, and the output lines of all stages."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(STAGES), "--no-python", sys.executable, __file__]
        done = subprocess.run(
            [*command, "--stage", folder],
            env=environment(megatron),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        answers = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    if done.returncode or len(answers) != STAGES:
        raise SystemExit(f"{megatron}: the loop ended with status {done.returncode}\n{done.stdout}")
    return answers, done.stdout.splitlines()


def own_tests(release: str, megatron: Path, checkout: Path) -> bool:
    """Return whether all tests that pass with Megatron's schedule pass with this project's, too."""
    with tempfile.TemporaryDirectory() as folder:
        tag = subprocess.run(
            ["git", "-C", checkout, "tag", "--list", f"core_v{release.rsplit('.', 1)[0]}.*"],
            capture_output=True, text=True, check=True,
        ).stdout.split()  # fmt: skip
        if not tag:
            print(f"  {release}: {checkout} has no tag of it")
            return True
        archive = subprocess.run(  # two lists, no shell: git allows ; and $( in a tag's name
            ["git", "-C", checkout, "archive", f"refs/tags/{tag[-1]}"],
            stdout=subprocess.PIPE,
            check=True,
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        script = [sys.executable, str(ROOT / "scripts" / "upstream" / "upstream_schedule_tests.py")]
        done = subprocess.run(
            [*script, "--megatron", folder, "--tests", SCHEDULE_TESTS],
            env=environment(megatron),
        )
    return done.returncode == 0


# ------------------------------------------------------------------ a stage, under torchrun


def stage(folder: Path) -> None:
    from megatron_epp.mcore.patching import cpu_host

    with suppress(ValueError):  # of the trainer's seams, which are for other releases
        cpu_host.install_cpu_host()

    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=STAGES)
    with cpu_host.double_precision():
        model_parallel_cuda_manual_seed(1)
        answer = compared(rank)
    (folder / f"{rank}.json").write_text(json.dumps(answer))
    dist.barrier()


def compared(rank: int) -> dict:
    """Return a rank's answer; ``lacking`` is the difference if Megatron lacks a function."""
    from megatron.core.pipeline_parallel import schedules

    import megatron_epp

    worst, calls, planned = 0.0, 0, 0
    for variable in (False, True):
        model = build_model(rank, variable)
        stock = every_call(model, variable)
        made, ran = plans_of_any_order()
        with made:
            worst = max(worst, difference(every_call(model, variable), stock))
        calls, planned = calls + len(stock), planned + len(ran)
    function = getattr(schedules, RENAMED)
    delattr(schedules, RENAMED)
    made = megatron_epp.install_schedule()
    setattr(schedules, RENAMED, function)  # Megatron's own knows its functions by their new names
    with made:
        lacking = difference(every_call(model, variable), stock)
    return {"calls": calls, "planned": planned, "worst": worst, "lacking": lacking}


def difference(ours: list, stock: list) -> float:
    """Return the largest difference of losses and gradients.

    Differences of gradients are relative to the largest element of the tensor.
    """
    found = []
    for (losses, gradients), (own_losses, own_gradients) in zip(ours, stock, strict=True):
        assert gradients.keys() == own_gradients.keys()
        found += [abs(a - b) for a, b in zip(losses, own_losses, strict=True)]
        found += [
            float((gradients[name] - own).abs().max() / own.abs().max())
            for name, own in own_gradients.items()
        ]
    return max(found)


def plans_of_any_order():
    """Return an installation with random valid plans, and the list of its calls."""
    from megatron_epp.certify.loops.micro_batches import arbitrary_unsliced_plan
    from megatron_epp.mcore.loops.install import Installation
    from megatron_epp.mcore.loops.settings import Settings
    from megatron_epp.planner.calls.call_options import CallOptions

    ran: list = []
    random = Random(0)

    def draw(shapes, layers, rates, options, forward_only):
        tokens = [shape.tokens for shape in shapes]
        return arbitrary_unsliced_plan(tokens, layers, random, options.split, forward_only)

    settings = Settings(options=CallOptions(), observe=ran.append, make_plan=draw)
    return Installation(settings), ran


def build_model(rank: int, variable: bool):
    """Return a stage as megatron.core loops build it, wrapped in DDP with one gradient buffer."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=4, hidden_size=HIDDEN, num_attention_heads=4, num_query_groups=2,
        attention_dropout=0.0, hidden_dropout=0.0, add_bias_linear=False, normalization="RMSNorm",
        pipeline_model_parallel_size=STAGES, pipeline_dtype=torch.float64,
        params_dtype=torch.float64, variable_seq_lengths=variable, persist_layer_norm=False,
        calculate_per_token_loss=not variable, deallocate_pipeline_outputs=True,
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths asks for it

    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), WORDS, CONTEXT,
        pre_process=rank == 0, post_process=rank == STAGES - 1, position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )  # fmt: skip
    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=False), model
    )
    config.no_sync_func = wrapped.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def every_call(model, variable: bool) -> list[tuple[list[float], dict]]:
    """Return (losses, gradients) of each call: training and forward-only passes in turn."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    made = []
    for number in range(CALLS):
        forward_only = number % 2 == 1
        model.zero_grad_buffer()
        found = get_forward_backward_func()(
            forward_step_func=forward_step(variable), data_iterator=micro_batches(number, variable),
            model=[model], num_microbatches=BATCHES, seq_length=CONTEXT, micro_batch_size=1,
            forward_only=forward_only,
        )  # fmt: skip
        losses = [float(item["loss"]) for item in found]
        gradients = {} if forward_only else {
            name: parameter.main_grad.clone() for name, parameter in model.named_parameters()
        }  # fmt: skip
        made.append((losses, gradients))
    return made


def micro_batches(number: int, variable: bool):
    import torch

    random, drawn = Random(number), torch.Generator().manual_seed(number)
    for _ in range(BATCHES):
        length = random.randint(3, CONTEXT) if variable else CONTEXT
        yield {"tokens": torch.randint(WORDS, (1, length), generator=drawn)}


def forward_step(three: bool):
    """Return a forward step whose loss function returns a mean, or a sum with its number of tokens.

    With ``three``, the loss is the mean.
    """
    import torch

    def step(iterator, model):
        tokens = next(iterator)["tokens"]
        length = tokens.shape[1]
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        labels = torch.roll(tokens, -1, 1)
        return model(tokens, torch.arange(length)[None], mask, labels=labels), loss

    def loss(output):
        total = output.sum()
        if three:
            return total / output.numel(), {"loss": total.detach()}
        return total, torch.tensor(output.numel(), dtype=torch.int), {"loss": total.detach()}

    return step


if __name__ == "__main__":
    if sys.argv[1:2] == ["--stage"]:
        stage(Path(sys.argv[2]))
    else:
        sys.exit(main())
