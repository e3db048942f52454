"""``python -m megatron_epp profile``: measure this host or GPU before training.

    python -m megatron_epp profile [--pp N] [--tp N] [-o FILE] <Megatron model flags>

The command starts one process per rank (with gloo on a CPU-only host), measures, and writes a
cost-model file.
"""

import argparse
import copy
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_epp.control.files import scratch_folder
from megatron_epp.cost.profile import LayerCoefficients, Profile
from megatron_epp.flag_fields import add_flags, flag
from megatron_epp.ir import FULL, KEEP, Kind
from megatron_epp.mcore.calibrate.profile_file import FILE_NAME, obtain
from megatron_epp.mcore.hybrid.pattern import joined, mtp_part_of, symbols_of_layers
from megatron_epp.mcore.job import job_exit
from megatron_epp.mcore.kinds.registry import LAYER_KINDS
from megatron_epp.mcore.model.shape import layer_shapes, mtp_shapes
from megatron_epp.mcore.patching import cpu_host, cuda_host

_WORKER = "megatron_epp.mcore.trainer.profile_command"


@dataclass(frozen=True, slots=True)
class ProfileFlags:
    """Flags of ``python -m megatron_epp profile``, in addition to Megatron's flags."""

    pp: int = flag(
        2,
        "Number of pipeline stages that run at the same time (default: 2, or as many as there are "
        "GPUs).",
    )
    tp: int = flag(1, "Tensor-parallel degree (default: 1).")
    cp: int = flag(1, "Context-parallel degree (default: 1).")
    output: str = flag(
        FILE_NAME, f"Output file (default: {FILE_NAME}).", metavar="FILE", short="-o"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``python -m megatron_epp profile``.

    ``argv`` are the arguments; by default, the arguments of the process.

    Raises:
        ValueError: A flag is invalid or the measurement fails; the message is one line.

    Example:
        >>> from megatron_epp.mcore.trainer.profile_command import main
        >>> model = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192"
        >>> main(["--pp", "2", "-o", "cost.json", *model.split()])
    """
    parser = argparse.ArgumentParser(
        prog="python -m megatron_epp profile",
        description="Measure this host or GPU with a Megatron model's flags and write a "
        "cost-model file for --epp-cost-model. All other flags are Megatron's: --hidden-size, "
        "--num-attention-heads, --swiglu, --bf16, ...",
        allow_abbrev=False,
    )
    add_flags(parser, ProfileFlags)
    wanted, flags = parser.parse_known_args(argv)
    for name in ("pp", "tp", "cp"):
        if getattr(wanted, name) < 1:
            raise ValueError(f"--{name} {getattr(wanted, name)}: expected at least 1")
    if torch.cuda.is_available():
        wanted.pp = min(wanted.pp, max(1, torch.cuda.device_count() // (wanted.tp * wanted.cp)))
    output = Path(wanted.output)
    if not output.resolve().parent.is_dir():
        raise ValueError(f"-o {wanted.output}: no folder {output.resolve().parent}")
    named = {word.split("=")[0] for word in flags}
    for name in ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length"):
        if name not in named and not (name == "--num-layers" and named & set(_PATTERN)):
            raise ValueError(f"{name} is missing; give the flags of your training")
    processes = wanted.pp * wanted.tp * wanted.cp
    print(f"measuring with {processes} process(es) ...", flush=True)
    with scratch_folder("profile") as folder:
        log = folder / "log"
        command = [
            sys.executable, "-m", "torch.distributed.run",
            "--standalone", "--nproc-per-node", str(processes),
            "-m", _WORKER, str(output.resolve()), str(wanted.pp), str(wanted.tp), str(wanted.cp),
            *flags,
        ]  # fmt: skip
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        with log.open("w") as file:
            status = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False
            ).returncode
        if status:
            raise ValueError(_why(log.read_text(errors="replace")))
    print(summary(Profile.load(str(output))))
    print(f"written to {output}")


def _why(log: str) -> str:
    """Return the error message in a worker's ``log``, or the end of ``log`` if it has none."""
    mark = "megatron_epp: error: "
    for line in log.splitlines():
        if mark in line:
            return line.split(mark, 1)[1]
    error_lines = [
        line for line in log.splitlines() if re.match(r"(\[rank\d+\]: )?[\w.]*Error\b", line)
    ]
    return (
        f"the measuring processes failed: {error_lines[0] if error_lines else log.strip()[-500:]}"
    )


def summary(profile: Profile) -> str:
    """Return a profile's main coefficients as a few readable lines."""
    provenance = profile.provenance
    lines = [f"model   {provenance.model}", f"device  {provenance.device}, {provenance.dtype}"]
    for kind, each in profile.kinds.items():
        lines += _layer_summary(each, f" {kind}" if profile.other_kinds else "")
    lines += [
        f"ends    LM head and loss hold {profile.last_bytes.per_token:.0f} bytes per token",
        f"link    {profile.link_latency_seconds * 1e6:.3g} us, "
        f"{profile.link_seconds_per_token * 1e9:.3g} ns per token",
        f"host    {profile.host_bytes_per_second / 1e9:.3g} GB/s to its memory, and back",
        *(f"errors  {part}" for part in provenance.source.split("; ")[1:]),
    ]
    return "\n".join(lines)


def _layer_summary(coefficients: LayerCoefficients, kind: str) -> list[str]:
    forward, backward = (coefficients.layer_seconds[op] for op in (Kind.FORWARD, Kind.BACKWARD))
    return [
        f"layer{kind}   F {forward.per_token * 1e6:.4g} us per token, {forward.per_pair * 1e9:.4g} "
        f"ns per query-key pair, {forward.per_chunk * 1e3:.3g} ms per chunk",
        f"        B {backward.per_token * 1e6:.4g} us per token, {backward.per_pair * 1e9:.4g} ns "
        f"per query-key pair, {backward.per_chunk * 1e3:.3g} ms per chunk",
        f"        holds {coefficients.saved_bytes[KEEP].per_token:.0f} bytes per token from F to "
        f"B, {coefficients.saved_bytes[FULL].per_token:.0f} recomputed in full, K/V of a context "
        f"{coefficients.kv_bytes_per_token:.0f}",
        *(
            f"        its host issues {op.value} in {1e3 * coefficients.host_seconds[op]:.3g} ms"
            for op in (Kind.FORWARD, Kind.BACKWARD)
            if op in coefficients.host_seconds
        ),
    ]


class _Measured(Exception):
    """End of a measuring process that has written its file."""


def worker(argv: Sequence[str]) -> None:
    """Run one measuring process: start a training, and end it when the cost model is measured.

    The stages have one layer of every kind, and no data is read. ``argv`` are the output file, the
    pipeline-, tensor- and context-parallel degrees, and Megatron flags.
    """
    from megatron_epp.mcore.trainer import entry

    output, pp, tp, cp, *flags = argv
    cuda_host.prepare(["--epp"])
    cpu_host.install_cpu_host()  # before the hooks import Megatron
    try:
        layers, size = _layers(flags, int(pp))
        sys.argv = ["profile", *_with_defaults(_without_layout(flags)), "--epp", *size,
                    "--epp-placement", "even",
                    "--pipeline-model-parallel-size", pp,
                    "--tensor-model-parallel-size", tp,
                    "--context-parallel-size", cp]  # fmt: skip
        entry.train(
            time.time(),
            _measuring_hooks(output),
            hybrid=size[0].startswith(_PATTERN[0]),
            change=lambda args: _one_of_each_kind(args, layers, int(pp)),
        )
    except _Measured:
        job_exit.finish()
    except job_exit.ENDINGS as error:
        if not job_exit.is_users_mistake(error):
            raise
        job_exit.refuse_and_exit(error)


def _measuring_hooks(output: str) -> Any:
    """Return the trainer's hooks that write the measured cost model to ``output``, and end."""
    from megatron_epp.mcore.trainer.hooks import JobContext, TrainerHooks

    def make_steps(place: JobContext, models: Sequence[Any]) -> Any:
        profile = obtain(place.args, place.config, models, place.groups, place.row_shard)
        if place.groups.control.rank() == 0:
            profile.save(output)
        raise _Measured

    return TrainerHooks(make_steps=make_steps)


def _layers(flags: Sequence[str], pp: int) -> tuple[int, list[str]]:
    """Return the number of layers in ``flags``, and the flags with ``pp`` times that number."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--num-layers", type=int)
    parser.add_argument(*_PATTERN)
    parsed = parser.parse_known_args(flags)[0]
    if parsed.hybrid_layer_pattern is not None:
        symbols = symbols_of_layers(parsed.hybrid_layer_pattern)
        pattern = joined([symbols] * pp) + mtp_part_of(parsed.hybrid_layer_pattern)
        return len(symbols), [f"--hybrid-layer-pattern={pattern}"]
    layers = parsed.num_layers
    if layers is None or layers < 1:
        raise ValueError(f"--num-layers {layers}: expected at least 1")
    return int(layers), ["--num-layers", str(pp * layers)]


def _one_of_each_kind(args: Any, layers: int, pp: int) -> None:
    """Change ``args`` so that every stage has one layer of every kind of the model.

    ``layers`` is the model's number of layers.
    """
    full = copy.copy(args)
    full.num_layers = layers
    if args.hybrid_layer_pattern is not None:  # the pattern repeats on every stage
        mtp_suffix = mtp_part_of(args.hybrid_layer_pattern)
        full.hybrid_layer_pattern = symbols_of_layers(args.hybrid_layer_pattern)[:layers]
    shapes = layer_shapes(full)
    places = list(dict.fromkeys(map(shapes.index, shapes)))  # the first layer of each kind
    if mtp_shapes(args):  # Megatron builds MTP layers like the last layer
        places.sort(key=lambda place: shapes[place] == shapes[-1])
    if args.hybrid_layer_pattern is not None:
        one_of_each = "".join(full.hybrid_layer_pattern[place] for place in places)
        args.hybrid_layer_pattern = joined([one_of_each] * pp) + mtp_suffix
    args.num_layers = args.encoder_num_layers = len(places) * pp
    args.no_rope_freq = None  # layers without positions cost the same
    of_parts = {part: part.layers(full) for part in LAYER_KINDS}
    for part, layers_with_it in of_parts.items():
        vars(args).update(part.in_layers(args, [layers_with_it[place] for place in places] * pp))


_PATTERN = ("--hybrid-layer-pattern", "--hybrid-override-pattern")
# Flags that place layers on stages; here every stage has one layer of every kind.
_LAYOUT = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers",
           "--epp-placement", "--num-layers-per-virtual-pipeline-stage",
           "--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-layout",
           *_PATTERN)  # fmt: skip


def _without_layout(flags: Sequence[str]) -> list[str]:
    """Return ``flags`` without the flags (and values) that place layers on stages."""
    kept, skips = [], False
    for word in flags:
        if word.startswith("--"):
            skips = word.partition("=")[0] in _LAYOUT
        if not skips:
            kept.append(word)
    return kept


def _with_defaults(flags: Sequence[str]) -> list[str]:
    """Return ``flags``, plus default values of flags that Megatron needs to build a model."""
    fillers = {
        "--micro-batch-size": "1",
        "--global-batch-size": "8",
        "--train-iters": "1",
        "--lr": "1e-4",
        "--tokenizer-type": "NullTokenizer",
        "--attention-dropout": "0",
        "--epp-vocab-parallel": "off",
        "--seq-length": "16384",
        "--max-position-embeddings": "1000000",
    }
    named = {word.split("=")[0] for word in flags}
    missing = [word for flag in fillers.items() if flag[0] not in named for word in flag]
    if "--tokenizer-model" not in named and "--vocab-size" not in named:
        missing += ["--vocab-size", "32767"]
    return [*missing, *flags]


if __name__ == "__main__":
    worker(sys.argv[1:])
