"""The cost model's file: made by measuring, kept beside the checkpoint, refused for another model.

    python -m megatron_epp profile [--pp N] [--tp N] [-o FILE] <Megatron model flags>

starts its own processes (gloo without GPUs), one per rank, measures and writes the file. Training
without --epp-cost-model measures once at its start (``obtain``).
"""

import argparse
import datetime
import logging
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_epp.cost.profile import Profile, Provenance

logger = logging.getLogger(__name__)

FILE_NAME = "epp-cost-model.json"
ANALYTIC = "analytic"  # --epp-cost-model: not measured, from the model's shape
_WORKER = "megatron_epp.mcore.calibrate.profile_file"


# ------------------------------------------------------------------ whose profile it is


def provenance_of(args: Any) -> Provenance:
    """What a profile of this job must say of its model, its device and its number format."""
    from megatron_epp.mcore.model.early_head import early_head

    sizes = f"hidden {args.hidden_size} ffn {args.ffn_hidden_size}"
    heads = f"heads {args.num_attention_heads} x {args.kv_channels}"
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    words = [
        sizes,
        f"{heads} in {groups} groups",
        f"vocabulary {args.padded_vocab_size}",
        "swiglu" if args.swiglu else "gelu",
        args.normalization,
        f"positions {args.position_embedding_type}",
        "tied" if not args.untie_embeddings_and_output_weights else "untied",
        f"layers by {args.transformer_impl}",
    ]
    if args.add_bias_linear:
        words.append("biases")
    if args.hidden_dropout > 0:
        words.append("dropout")
    if args.tensor_model_parallel_size > 1:
        words.append(f"tp {args.tensor_model_parallel_size}")
    if args.sequence_parallel:
        words.append("sequence parallel")
    if args.context_parallel_size > 1:
        words.append(f"cp {args.context_parallel_size}")
    if not early_head(args):
        words.append("logits kept")
    return Provenance(
        model=", ".join(words),
        device=device_text(),
        dtype=str(args.params_dtype).removeprefix("torch."),
        date=datetime.date.today().isoformat(),
        source="measured",
    )


def device_text() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"cpu: {_processor()}, {torch.get_num_threads()} threads a rank"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def require(profile: Profile, wanted: Provenance, where: str) -> Profile:
    """``profile``, or a ValueError that says what it was measured for instead.

    An analytic profile was measured on nothing: whoever names one knows what he does.
    """
    made = profile.provenance
    if not made.source.startswith("measured"):
        return profile
    for what in ("model", "device", "dtype"):
        mine, theirs = getattr(wanted, what), getattr(made, what)
        if mine != theirs:
            raise ValueError(
                f"cost model {where} is of another {what}: it says {theirs!r}, this job has "
                f"{mine!r}; measure again with `python -m megatron_epp profile`, or leave "
                "--epp-cost-model out"
            )
    return profile


# ------------------------------------------------------------------ for the trainer


def obtain(args: Any, config: Any, model: Any, groups: Any, rows: Any) -> Profile:
    """The profile of this job; every rank calls it with its wrapped model, all get the same.

    --epp-cost-model where given; else the file beside the checkpoint that is resumed from, as the
    plans of the iterations before were made with it; else measured now and kept with --save.
    """
    if config.epp_cost_model == ANALYTIC:
        from megatron_epp.mcore.job_cost import analytic

        return analytic(args)
    from megatron.core.utils import unwrap_model

    from megatron_epp.mcore.calibrate.measure import calibrate
    from megatron_epp.mcore.calibrate.probe import Probe, undisturbed
    from megatron_epp.mcore.job_cost import model_shape, training_levers
    from megatron_epp.mcore.model.attention import this_device
    from megatron_epp.mcore.model.early_head import block_tokens, early_head
    from megatron_epp.mcore.setup import forward_step
    from megatron_epp.runtime.consensus import share

    wanted = provenance_of(args)
    text = error = None
    if groups.control.rank() == 0:
        try:
            text = _kept(args, config, wanted)
        except ValueError as refusal:
            error = str(refusal)
    text = share(text, error, groups.control)
    if text:
        return Profile.from_json(text)
    began = time.perf_counter()
    head_tokens = block_tokens(args) if early_head(args) else None
    device, context = this_device(), args.seq_length
    probe = Probe(unwrap_model(model), forward_step, rows, device, head_tokens, context)
    with undisturbed(model):
        split = "wsplit" in training_levers(config.epp_levers, args)
        profile = calibrate(probe, groups, model_shape(args), context, wanted, split)
    if groups.control.rank() == 0:
        places = [folder for folder in (args.save, config.epp_record) if folder]
        for folder in places:
            Path(folder).mkdir(parents=True, exist_ok=True)
            profile.save(str(Path(folder) / FILE_NAME))
        logger.info(
            "measured this device in %.1f s%s: %s",
            time.perf_counter() - began,
            f", kept in {places[0]}/{FILE_NAME}" if places else "",
            profile.provenance.source,
        )
    return profile


def _kept(args: Any, config: Any, wanted: Provenance) -> str:
    """The text of the profile to use, or nothing where none was kept."""
    if config.epp_cost_model is not None:
        path = config.epp_cost_model
        return require(Profile.load(path), wanted, path).to_json()
    path = str(Path(args.load or "") / FILE_NAME)
    if not args.load or not Path(path).exists():
        return ""
    try:
        return require(Profile.load(path), wanted, path).to_json()
    except ValueError as reason:
        logger.warning("%s: measuring again", reason)
        return ""


# ------------------------------------------------------------------ the command


def main(argv: Sequence[str] | None = None) -> None:
    """``python -m megatron_epp profile``. ValueError: one line on what cannot be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_epp profile",
        description="Measure this host or GPU with a Megatron model's flags and write a "
        "cost-model file for --epp-cost-model. All other flags are Megatron's: --hidden-size, "
        "--num-attention-heads, --swiglu, --bf16, ...",
        allow_abbrev=False,
    )
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages side by side, as in "
                        "training (default: 2, or as many as there are GPUs)")  # fmt: skip
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel degree (default: 1)")
    parser.add_argument("--cp", type=int, default=1, help="context-parallel degree (default: 1)")
    parser.add_argument("-o", "--output", default=FILE_NAME, metavar="FILE",
                        help=f"where to write it (default: {FILE_NAME})")  # fmt: skip
    wanted, flags = parser.parse_known_args(argv)
    for name in ("pp", "tp", "cp"):
        if getattr(wanted, name) < 1:
            raise ValueError(f"--{name} {getattr(wanted, name)}: expected at least 1")
    if torch.cuda.is_available():
        wanted.pp = min(wanted.pp, max(1, torch.cuda.device_count() // (wanted.tp * wanted.cp)))
    output = Path(wanted.output)
    if not output.resolve().parent.is_dir():
        raise ValueError(f"-o {wanted.output}: no folder {output.resolve().parent}")
    for flag in ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length"):
        if not any(word == flag or word.startswith(flag + "=") for word in flags):
            raise ValueError(f"{flag} is missing; give the flags of your training")
    processes = wanted.pp * wanted.tp * wanted.cp
    print(f"measuring with {processes} process(es) ...", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [
            sys.executable, "-m", "torch.distributed.run",
            "--nproc-per-node", str(processes), "--master-port", str(_free_port()),
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _why(log: str) -> str:
    """The line that a worker refused with, or the end of what it said."""
    mark = "megatron_epp: error: "
    for line in log.splitlines():
        if mark in line:
            return line.split(mark, 1)[1]
    said = [line for line in log.splitlines() if re.match(r"(\[rank\d+\]: )?[\w.]*Error\b", line)]
    return f"the measuring processes failed: {said[0] if said else log.strip()[-500:]}"


def summary(profile: Profile) -> str:
    """A profile in a few lines, for a person."""
    from megatron_epp.ir import FULL, KEEP, Kind

    forward, backward = (profile.layer_seconds[kind] for kind in (Kind.FORWARD, Kind.BACKWARD))
    made = profile.provenance
    lines = [
        f"model   {made.model}",
        f"device  {made.device}, {made.dtype}",
        f"layer   F {forward.per_token * 1e6:.4g} us per token, {forward.per_pair * 1e9:.4g} ns "
        f"per query-key pair, {forward.per_chunk * 1e3:.3g} ms per chunk",
        f"        B {backward.per_token * 1e6:.4g} us per token, {backward.per_pair * 1e9:.4g} ns "
        f"per query-key pair, {backward.per_chunk * 1e3:.3g} ms per chunk",
        f"        holds {profile.saved_bytes[KEEP].per_token:.0f} bytes per token from F to B, "
        f"{profile.saved_bytes[FULL].per_token:.0f} recomputed in full, "
        f"K/V of a context {profile.kv_bytes_per_token:.0f}",
        f"ends    output layer and loss hold {profile.last_bytes.per_token:.0f} bytes per token",
        f"link    {profile.link_latency_seconds * 1e6:.3g} us, "
        f"{profile.link_seconds_per_token * 1e9:.3g} ns per token",
        *(f"errors  {part}" for part in made.source.split("; ")[1:]),
    ]
    return "\n".join(lines)


def worker(argv: Sequence[str]) -> None:
    """One measuring process: builds a stage of one layer as the trainer would, and calibrates."""
    output, pp, tp, cp, *flags = argv
    from megatron_epp.mcore import job_exit
    from megatron_epp.mcore.patching import cpu_host, cuda_host, seams

    cuda_host.prepare(["--epp"])
    cpu_host.install_cpu_host()
    seams.install(seams.ALWAYS_SEAMS)
    try:
        _measure(output, int(pp), int(tp), int(cp), flags)
    except Exception as error:
        if not job_exit.is_users_mistake(error):
            raise
        job_exit.refuse(error)
    job_exit.finish()


def _measure(output: str, pp: int, tp: int, cp: int, flags: Sequence[str]) -> None:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import get_args
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.initialize import initialize_megatron

    from megatron_epp.mcore import entry, megatron_gpt, refusals
    from megatron_epp.mcore.config import FUSED_LINEARS, Config
    from megatron_epp.mcore.data.row_share import RowShare
    from megatron_epp.mcore.model.attention import attention_for, this_device
    from megatron_epp.mcore.model.hooks import fuse_weight_gradients, install_in_model
    from megatron_epp.mcore.model.layer_spec import allow_context_parallelism
    from megatron_epp.mcore.patching import cpu_host, seams
    from megatron_epp.mcore.process_groups import make_groups

    sys.argv = ["profile", *_with_defaults(flags), "--epp", "--num-layers", str(pp),
                "--pipeline-model-parallel-size", str(pp),
                "--tensor-model-parallel-size", str(tp),
                "--context-parallel-size", str(cp)]  # fmt: skip
    entry.read_flags()
    args = get_args()
    refusals.refuse(args)
    with entry.refusals_as_value_errors():
        model_config = gpt_config_from_args(args)
    seams.install(seams.EPP_SEAMS)
    initialize_megatron(
        get_embedding_ranks=megatron_gpt.embedding_ranks, allow_no_cuda=not cpu_host.has_gpu()
    )
    if cp > 1:
        allow_context_parallelism(model_config)
    config = Config.of(args)

    def attach(models: list[Any]) -> list[Any]:
        attention = attention_for(config.epp_attention, models[0].config, this_device())
        install_in_model(models[0], args.seq_length, attention)
        if getattr(args, FUSED_LINEARS, False):
            fuse_weight_gradients(models[0])
        return models

    model_config.pre_wrap_hooks.append(attach)
    builder = model_config.get_builder_cls()(model_config)
    (model,) = builder.build_distributed_models(
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(), wrap_with_ddp=False
    )
    groups = make_groups(this_device())
    profile = obtain(args, config, model, groups, RowShare.of(args))
    if groups.control.rank() == 0:
        profile.save(output)


def _with_defaults(flags: Sequence[str]) -> list[str]:
    """What Megatron asks for besides a model's shape, and measuring does not depend on."""
    fillers = {
        "--micro-batch-size": "1",
        "--global-batch-size": "8",
        "--train-iters": "1",
        "--lr": "1e-4",
        "--tokenizer-type": "NullTokenizer",
        "--attention-dropout": "0",
        "--seq-length": "16384",
        "--max-position-embeddings": "1000000",
    }
    given = {word.split("=")[0] for word in flags}
    missing = [word for flag in fillers.items() if flag[0] not in given for word in flag]
    if "--tokenizer-model" not in given and "--vocab-size" not in given:
        missing += ["--vocab-size", "32767"]
    return [*missing, *flags]


if __name__ == "__main__":
    worker(sys.argv[1:])
