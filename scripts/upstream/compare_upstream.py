"""Bitwise comparison of this package without --epp with Megatron-LM's own pretrain_gpt.py.

    python scripts/upstream/compare_upstream.py --megatron PATH [flags of Megatron's, after --]

PATH is a Megatron-LM checkout, at tag core_v0.19.0 for any 0.19. Its pretrain_gpt.py and this
package's each train a tiny model with the same flags and seed, with dropout, with mock data and
with a .bin/.idx corpus, over one and over two pipeline stages. The script compares the loss and
gradient norm of every iteration, as the trainer passes them to its log, in full precision, and
every tensor of the saved checkpoint: weights, optimizer, random states. The exit status is 1 if
anything differs.

Both sides import megatron.core and megatron.training from the installed wheel, because only the
scripts are compared. The script also compares the checkout's trainer with the wheel's file by file,
and prints the result. pretrain_gpt.py and the modules next to it come from PATH. Both sides use the
same CPU host without a GPU, and GPUs if there are any.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS = 10
MODEL = (  # noqa: SIM905 (a command line reads better than a list of its words)
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 "
    "--group-query-attention --num-query-groups 2 --position-embedding-type rope --swiglu "
    "--normalization RMSNorm --disable-bias-linear --seq-length 64 --max-position-embeddings 64 "
    "--attention-dropout 0.1 --hidden-dropout 0.1"
).split()
TRAINING = (
    f"--micro-batch-size 2 --global-batch-size 8 --train-iters {ITERATIONS} "
    "--lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 2 --weight-decay 0.1 --clip-grad 1.0 "
    "--seed 1234 --log-interval 1 --eval-interval 5 --eval-iters 1 --ckpt-format torch "
    "--save-interval 1000 --tokenizer-type NullTokenizer --vocab-size 255"
).split()

CPU_FLAGS = (  # what cpu_host.cpu_defaults sets, for Megatron's own script
    "--distributed-backend gloo --transformer-impl local --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion "
    "--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --num-workers 0"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run: (loss, gradient norm) of each iteration, and all saved tensors."""

    steps: tuple[tuple[float, float], ...]
    tensors: dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--megatron", type=Path, required=True, help="Megatron-LM at core_v0.19.0")
    parser.add_argument("flags", nargs="*", help="more flags for Megatron, after --")
    options = parser.parse_args()
    upstream = options.megatron.resolve()
    if not (upstream / "pretrain_gpt.py").is_file():
        parser.error(f"--megatron {upstream}: no pretrain_gpt.py there")
    print(f"upstream: {upstream / 'pretrain_gpt.py'} (sources: {same_sources(upstream)})")
    print(f"ours:     {ROOT / 'megatron_epp' / 'pretrain_gpt.py'}\n")
    print("data      PP iterations  first and last loss  differ  tensors  differ")
    different = False
    with tempfile.TemporaryDirectory(prefix="compare_upstream.") as folder:
        scratch = Path(folder)
        corpus = write_corpus(scratch / "corpus")
        for name, data in (("mock", ["--mock-data"]), (".bin/.idx", corpus)):
            for stages in (1, 2):
                flags = [*MODEL, *TRAINING, *data, *options.flags]
                flags += ["--pipeline-model-parallel-size", str(stages)]
                outcomes = []
                for side in ("upstream", "ours"):
                    place = scratch / f"{name.replace('/', '')}.{stages}.{side}"
                    outcomes.append(train(side, upstream, place, flags, stages))
                theirs, ours = outcomes
                steps = sum(a != b for a, b in zip(theirs.steps, ours.steps, strict=True))
                tensors = differing(theirs.tensors, ours.tensors)
                losses = f"{ours.steps[0][0]:.5f} to {ours.steps[-1][0]:.5f}"
                print(
                    f"{name:9} {stages:>2} {len(ours.steps):>10}  {losses:>19}  {steps:>6}  "
                    f"{len(ours.tensors):>7}  {len(tensors):>6}",
                    flush=True,
                )
                for tensor in tensors[:5]:
                    print(f"    differs: {tensor}")
                different |= bool(steps or tensors)
    print("\ndifferent" if different else "\nidentical, to the last bit")
    return int(different)


# ------------------------------------------------------------------ the two sides


def train(side: str, upstream: Path, place: Path, flags: list[str], processes: int) -> Outcome:
    """Train one side in new processes, with a log at ``place``/log; return its results."""
    import torch

    place.mkdir()
    gpu_flags = ["--use-distributed-optimizer"] if torch.cuda.is_available() else []
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)),
        *("--master-port", str(free_port()), __file__, "--side", side, str(upstream), str(place)),
        *(*flags, *gpu_flags, "--save", str(place / "saved")),
        *("--data-cache-path", str(place / "cache")),
    ]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}
    with (place / "log").open("w") as log:
        status = subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment
        ).returncode
    if status != 0:
        raise SystemExit(
            f"{side} failed with status {status}:\n{(place / 'log').read_text()[-4000:]}"
        )
    return Outcome(
        steps=tuple(map(tuple, json.loads((place / "steps.json").read_text()))),
        tensors=dict(saved_tensors(place / "saved" / f"iter_{ITERATIONS:07d}")),
    )


def run_side(side: str, upstream: str, place: str, flags: list[str]) -> None:
    """Run the script of one side in this process, as from the shell; record losses and norms."""
    from megatron_epp.mcore.job import job_exit
    from megatron_epp.mcore.patching import cpu_host, patch_points

    if cpu_host.install_cpu_host():
        flags = [*flags, *CPU_FLAGS.split()]
    patch_points.install(patch_points.ALWAYS_PATCH_POINTS)
    from megatron.training import training

    plain_log, steps = training.training_log, []

    def training_log(loss_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if loss_dict:
            # JSON keeps a double exactly, and a float32 is one.
            norm = kwargs["grad_norm"] if "grad_norm" in kwargs else args[6]
            steps.append((float(loss_dict["lm loss"]), float(norm)))
            (Path(place) / "steps.json").write_text(json.dumps(steps))
        return plain_log(loss_dict, *args, **kwargs)

    training.training_log = training_log
    # The wheel comes first on the path; from the checkout only what the wheel lacks is found.
    sys.path.append(upstream)
    if side == "ours":
        sys.argv = ["pretrain_gpt.py", *flags]
        runpy.run_module("megatron_epp.pretrain_gpt", run_name="__main__")
    else:
        sys.argv = [str(Path(upstream) / "pretrain_gpt.py"), *flags]
        runpy.run_path(sys.argv[0], run_name="__main__")
        job_exit.finish()  # ours does it itself


# ------------------------------------------------------------------ what they are compared by


def saved_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield (file and path, tensor) of a checkpoint in Megatron's torch format."""
    import numpy
    import torch

    def walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from walk(inner, f"{path}/{key}")
        elif isinstance(value, list | tuple):
            for index, inner in enumerate(value):
                yield from walk(inner, f"{path}/{index}")
        elif isinstance(value, numpy.ndarray):
            yield path, torch.from_numpy(value.astype(numpy.int64))
        elif isinstance(value, torch.Tensor):
            yield path, value

    for file in sorted(folder.glob("mp_rank_*/*.pt")):
        state = torch.load(file, map_location="cpu", weights_only=False)
        yield from walk(state, f"{file.parent.name}/{file.name}")


def differing(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Return the names of tensors that one side lacks, or that differ in any bit."""
    import torch

    missing = sorted(theirs.keys() ^ ours.keys())
    return missing + [
        name
        for name in sorted(theirs.keys() & ours.keys())
        if not torch.equal(theirs[name], ours[name])
    ]


def same_sources(upstream: Path) -> str:
    """Return a short comparison of the checkout's trainer and core with the installed wheel."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.submodule_search_locations is not None
    wheel = Path(next(iter(spec.submodule_search_locations))).parent
    changed = [
        str(file.relative_to(wheel))
        for part in ("core", "training")
        for file in sorted((wheel / part).rglob("*.py"))
        if not (upstream / "megatron" / file.relative_to(wheel)).is_file()
        or (upstream / "megatron" / file.relative_to(wheel)).read_bytes() != file.read_bytes()
    ]
    changed = [name for name in changed if not name.endswith("package_info.py")]
    if not changed:
        return "identical to the wheel's but for the version number"
    return f"{len(changed)} files differ from the wheel's: {', '.join(changed[:3])}"


def write_corpus(prefix: Path) -> list[str]:
    """Write a corpus of 400 random documents of 2 to 299 tokens; return its flags."""
    import numpy
    import torch

    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    random = numpy.random.default_rng(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for length in random.integers(2, 300, size=400):
        builder.add_document(torch.from_numpy(random.integers(0, 255, size=length)), [int(length)])
    builder.finalize(f"{prefix}.idx")
    return ["--data-path", str(prefix), "--split", "90,5,5"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if sys.argv[1:2] == ["--side"]:
        run_side(sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5:])
    else:
        sys.exit(main())
