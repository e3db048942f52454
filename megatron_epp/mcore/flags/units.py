"""Units of Megatron's flags that count samples; with ``--epp``, a sample is a document.

A sample of Megatron's own datasets has --seq-length tokens, but documents have different lengths.
docs/guides/data.md contains the table ``UNITS`` too, and a test compares both. If a job uses flags
that count samples, the job prints :func:`units_line` at its start.
"""

from typing import Any

UNITS = {
    "--data-path": "weights: tokens, as in Megatron; `--epp-blend documents` for documents",
    "--split": "documents, as in Megatron: consecutive sequences of each corpus",
    "--mid-level-dataset-surplus": "nothing: a corpus supplies the documents that are drawn",
    "--global-batch-size": "documents; so do `--eval-global-batch-size` and `--micro-batch-size`",
    "--step-batch-size-schedule": "thresholds: documents times `--seq-length`, not their tokens",
    "--decrease-batch-size-if-needed": "documents: the batch becomes a multiple of the replicas",
    "--rampup-batch-size": "nothing: Megatron 0.19.2 reads the flag but does not use it",
    "--train-iters": "iterations, as all flags in iterations do; the number of tokens varies",
    "--train-samples": "documents",
    "--lr-decay-samples": "documents",
    "--lr-warmup-samples": "documents",
    "--lr-wsd-decay-samples": "documents",
    "--eval-iters": "batches of `--eval-global-batch-size` documents",
    "--full-validation": "every document of the validation set once",
    "--phase-transition-iterations": "iterations of `--global-batch-size` documents",
    "--override-ckpt-iteration": "iterations of `--global-batch-size` documents",
    "--log-progress": "tokens, as documents times `--seq-length`; the log has the true number",
}
# Flags by which Megatron counts samples (or tokens, as samples times --seq-length). The line at the
# start names them.
_SAID = (
    "train_samples lr_decay_samples lr_warmup_samples lr_wsd_decay_samples step_batch_size_schedule"
)


def units_line(args: Any, mean_length: float) -> str | None:
    """Return a line that names the flags in ``args`` that count documents; None if there are none.

    ``mean_length`` is the mean number of tokens per document.
    """
    values = {name: getattr(args, name, None) for name in _SAID.split()}
    shown = [f"--{name.replace('_', '-')} {value}" for name, value in values.items() if value]
    if not shown:
        return None
    return (
        f"{', '.join(shown)}: counts documents, of {mean_length:.1f} tokens on average, where "
        f"samples of Megatron's own data sets have --seq-length {args.seq_length}"
    )
