"""Cost-model files: measured profiles that are saved next to the checkpoint.

If there is neither such a file nor --epp-cost-model, training measures at its start (``obtain``).
``python -m megatron_epp profile`` measures before training (trainer/profile_command.py).
"""

import datetime
import logging
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_epp.control.files import BestEffort, write_atomically
from megatron_epp.cost.profile import MEASURED, Profile, Provenance
from megatron_epp.mcore.flags.config import ANALYTIC

logger = logging.getLogger(__name__)

FILE_NAME = "epp-cost-model.json"


# ------------------------------------------------------------------ whose profile it is


def provenance_of(args: Any) -> Provenance:
    """Return the provenance of this job's profile: model, device and dtype."""
    from megatron_epp.mcore.kinds.base import query_groups
    from megatron_epp.mcore.lm_head.fused_head import fused_head

    sizes = f"hidden {args.hidden_size} ffn {args.ffn_hidden_size}"
    heads = f"heads {args.num_attention_heads} x {args.kv_channels}"
    groups = query_groups(args)
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
    if getattr(args, "fp8", None):
        words.append(f"fp8 {args.fp8} {args.fp8_recipe}")
    if args.sequence_parallel:
        words.append("sequence parallel")
    if args.context_parallel_size > 1:
        words.append(f"cp {args.context_parallel_size}")
    if not fused_head(args):
        words.append("logits kept")
    if args.hybrid_layer_pattern is not None:
        words.append("HybridModel")
    words += _of_kinds(args)
    return Provenance(
        model=", ".join(words),
        device=device_text(),
        dtype=str(args.params_dtype).removeprefix("torch."),
        date=datetime.date.today().isoformat(),
        source=MEASURED,
        kind=MEASURED,
    )


def _of_kinds(args: Any) -> list[str]:
    """Return texts on layer kinds for the provenance, such as how experts exchange tokens."""
    from megatron_epp.mcore.kinds.registry import LAYER_KINDS
    from megatron_epp.mcore.model.shape import model_shape

    words = [word for part in LAYER_KINDS for word in part.words(args)]
    kinds = model_shape(args).kinds
    if len(kinds) > 1:
        words.append(f"kinds {' '.join(kinds)}")
    return words


def device_text() -> str:
    """Return the name of the GPU, or the name of the CPU and the number of threads per rank."""
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
    """Return ``profile`` if its model, device and dtype are those of ``wanted``.

    The function accepts every profile that was not measured, because the user has chosen it.

    Raises:
        ValueError: The profile belongs to another model, device or dtype. The message names
            ``where``, the path of the file.
    """
    provenance = profile.provenance
    if provenance.kind != MEASURED:
        return profile
    for what in ("model", "device", "dtype"):
        expected, recorded = getattr(wanted, what), getattr(provenance, what)
        if expected != recorded:
            raise ValueError(
                f"cost model {where} is of another {what}: it says {recorded!r}, this job has "
                f"{expected!r}; measure again with `python -m megatron_epp profile`, or leave "
                "--epp-cost-model out"
            )
    return profile


# ------------------------------------------------------------------ for the trainer


def obtain(
    args: Any,
    config: Any,
    models: Sequence[Any],
    groups: Any,
    rows: Any,
    after: Callable[[Profile], object] = lambda profile: None,
) -> Profile:
    """Return the profile of this job; all ranks must call this function.

    With --epp-cost-model FILE, the function reads the file; with --epp-cost-model analytic, it
    returns the analytic profile. Otherwise it reads the file next to the resumed checkpoint. If
    that file is missing, invalid, or of another model, device or dtype, the function measures a
    profile and saves it in the folders --save and --epp-record.

    Args:
        args: Megatron's arguments.
        config: The configuration of --epp.
        models: The wrapped stage modules of this rank, first to last.
        groups: The job's process groups.
        rows: ``RowShard`` that selects the rows (tokens) of a chunk on this rank.
        after: Function that rank 0 calls with a profile that was measured now.

    Returns:
        The same profile on all ranks.

    Raises:
        ValueError: The file of --epp-cost-model is invalid, or of another model, device or dtype;
            or the measurements cannot be fitted.
    """
    from megatron_epp.mcore.job.job_cost import on_these_ranks

    if config.epp_cost_model == ANALYTIC:
        from megatron_epp.mcore.job.job_cost import analytic

        return on_these_ranks(args, analytic(args))
    from megatron.core.utils import unwrap_model

    from megatron_epp.mcore.calibrate.measure import calibrate
    from megatron_epp.mcore.calibrate.probe import undisturbed
    from megatron_epp.mcore.job.job_cost import training_levers
    from megatron_epp.mcore.kinds.mtp.mtp_layers import kinds_of_stage
    from megatron_epp.mcore.lm_head.shard import full_output_layer
    from megatron_epp.mcore.model.shape import model_shape
    from megatron_epp.runtime.consensus import broadcast_result

    wanted = provenance_of(args)
    if text := broadcast_result(partial(_kept, args, config, wanted), groups.control):
        return on_these_ranks(args, Profile.from_json(text))
    began = time.perf_counter()
    if groups.control.rank() == 0:
        logger.info("measuring this device for the cost model, before the first iteration ...")
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(undisturbed(model))
            stack.enter_context(full_output_layer(unwrap_model(model)))
        probes, shape = [probe_of(args, model, rows) for model in models], model_shape(args)
        profile = calibrate(
            probes,
            groups,
            shape,
            args.seq_length,
            wanted,
            "wsplit" in training_levers(config.epp_levers),
            [kinds_of_stage(shape, probe.model) for probe in probes],
        )
    if groups.control.rank() == 0:
        places = [folder for folder in (args.save, config.epp_record) if folder]
        keep = BestEffort()
        for path in (Path(folder) / FILE_NAME for folder in places):
            keep(f"the cost model, {path},", partial(write_atomically, path, profile.to_json()))
        logger.info(
            "measured this device in %.1f s%s: %s",
            time.perf_counter() - began,
            f", kept in {places[0]}/{FILE_NAME}" if places else "",
            profile.provenance.source,
        )
        after(profile)
    return profile


def probe_of(args: Any, model: Any, rows: Any) -> Any:
    """Return the probe of ``model``, a wrapped stage module (probe.py)."""
    from megatron.core.utils import unwrap_model

    from megatron_epp.mcore.calibrate.probe import Probe
    from megatron_epp.mcore.lm_head.fused_head import block_tokens, fused_head
    from megatron_epp.mcore.model.attention import this_device
    from megatron_epp.mcore.model.forward import chunk_forward_step

    head_tokens = block_tokens(args) if fused_head(args) else None
    unwrapped = unwrap_model(model)
    return Probe(unwrapped, chunk_forward_step, rows, this_device(), head_tokens, args.seq_length)


def _kept(args: Any, config: Any, wanted: Provenance) -> str:
    """Return the JSON text of a saved profile for this model, device and dtype, or ""."""
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
