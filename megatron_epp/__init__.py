"""Elastic Pipeline Parallelism for Megatron-LM: plans made for the documents of every iteration."""

from collections.abc import Callable, Sequence
from typing import Any

__version__ = "0.1.0"  # pyproject.toml and CITATION.cff's test read it here


def add_arguments(parser: Any) -> Any:
    """Add the ``--epp`` flags to Megatron's parser: an ``extra_args_provider`` for scripts of your
    own."""
    from megatron_epp.mcore.job.read_flags import with_our_flags

    return with_our_flags(parser)


def install(
    args: Any,
    model_config: Any,
    items: Callable[[Sequence[int | None]], Sequence[Any]] | None = None,
) -> tuple[Any, Any]:
    """Put elastic pipelines into Megatron's trainer; for entry scripts of your own.

    Call it between reading the flags and ``pretrain``: ``args`` are Megatron's, with those of
    :func:`add_arguments`; ``model_config`` is what ``gpt_config_from_args`` made of them, or
    ``hybrid_config_from_args``. Returns the forward step and the data provider to hand to
    ``pretrain``. On a host without a GPU call :func:`prepare_host` before the first import of
    Megatron. A ValueError says in one line what cannot run.

    ``items`` gives documents of your own in the place of --data-path: called with the samples that
    training, validation and test want (None: one epoch), it returns a dataset for each, or None. A
    dataset has a length, ``original_seq_lens`` (the length of every item, known ahead), and items
    that are mappings of tokens, labels, loss_mask and original_seq_len; docs/guides/data.md.
    """
    from megatron_epp.mcore.patching import patch_points
    from megatron_epp.mcore.trainer import setup
    from megatron_epp.mcore.trainer.hooks import TrainerHooks

    patch_points.install(patch_points.ALWAYS_PATCH_POINTS)
    patch_points.install(patch_points.EPP_PATCH_POINTS)
    return setup.setup(args, model_config, TrainerHooks(items=items))


def prepare_host() -> bool:
    """Make Megatron run on a host without a GPU; returns whether this is one."""
    from megatron_epp.mcore.patching import cpu_host

    return cpu_host.install_cpu_host()


def install_schedule(
    *,
    lengths: Any = None,
    reorder: bool = True,
    split_backward: bool | None = None,
    headroom: float = 0.0,
    timeout: Any = None,
    observe: Any = None,
) -> Any:
    """Run the micro-batches of any training loop as plans: wherever it calls what
    ``megatron.core.pipeline_parallel.get_forward_backward_func`` returns.

    The loop stays as it is: forward step, iterator, model, losses, order of what is returned. Each
    micro-batch is a chunk; seconds that were measured in earlier calls choose the order of
    micro-batches and where backwards are split, within what Megatron's 1F1B would have held on its
    fullest rank in this call or one before.
    Where nothing is gained the order is Megatron's; calls that ask for what plans cannot do
    (CUDA graphs, ...) are left to Megatron, which is logged once.

    lengths          (micro-batch as the iterator gives it) -> rows of its hidden states over all
                     ranks of a stage, padding included, or a MicrobatchShape
                     (planner/calls/microbatch.py), or None where it cannot tell. Needed where
                     ``variable_seq_lengths`` is on and micro-batches are no mappings with
                     ``tokens`` or ``input_ids``: else Megatron's
                     schedule runs such calls
    reorder          micro-batches may run in another order (never with experts)
    split_backward   backwards may be split into halves for input and weight gradients; None: in
                     Megatron's local layers, not in Transformer Engine's (no GPU has run those)
    headroom         hold so much more than Megatron's 1F1B would on its fullest rank, as a share
    timeout          (datetime.timedelta) how long a rank waits for another; default 10 minutes
    observe          called behind every call with its plan, records and peak (loops/settings.py)

    Returns an object whose ``remove()`` puts Megatron's schedules back; it is a context, too. A
    ValueError says what cannot be used. A loop that keeps the function must be built behind this.
    With a Megatron that lacks what a plan needs (one before 0.16) its own schedule stays in place:
    a warning says why, and so does ``reason`` of what is returned.
    """
    from megatron_epp.autoload import NoInstallation

    try:
        from megatron_epp.mcore.loops.install import Installation, require_megatron
        from megatron_epp.mcore.loops.settings import TIMEOUT, Settings
        from megatron_epp.planner.calls.call_options import CallOptions

        require_megatron()
    except (ImportError, AttributeError) as lacking:
        return NoInstallation(str(lacking))
    return Installation(
        Settings(
            lengths=lengths,
            options=CallOptions(reorder, split_backward is not False, headroom),
            split_engines=bool(split_backward),
            timeout=TIMEOUT if timeout is None else timeout,
            observe=observe,
        )
    )


def log_probs(
    model: Any,
    labels: Any,
    *,
    temperature: Any = 1.0,
    entropy: bool = False,
    **inputs: Any,
) -> Any:
    """Log-probabilities of tokens by a model of Megatron's, without its logits: no more of them
    than a block of rows' live at once, in forward and backward.

    For a forward step, in the place of ``model(**inputs)``: under any schedule, with any model that
    holds Megatron's GPTModel or HybridModel, whole or in slices, without :func:`attach` as well.
    On the last stage returns log-probabilities [B, S] of ``labels``, in float32 (float64 where the
    model is), or with ``entropy`` them and the entropies [B, S] of the words' distributions; on
    other stages what the model returns. Gradients go through both.

    labels        [B, S]: the token that each token is to predict; None may be on other stages
                  than the last. Over context-parallel ranks: of this rank's tokens
    temperature   by which logits are divided: a number, or a tensor that expands to [B, S]
    inputs        of the model's forward, but no labels of its own

    Softmax is over all words of the output layer, those that pad it among them, as in Megatron's
    loss. ValueError: labels of another shape; an output layer with a bias or adapters; a model that
    predicts further tokens.
    """
    from megatron_epp.mcore.loops.token_log_probs import model_log_probs

    return model_log_probs(model, labels, temperature, entropy, inputs)


def divide(
    lengths: Sequence[int],
    replicas: int,
    *,
    model: str,
    device: str = "h100-80g",
    profile: Any = None,
    same_count: bool = False,
    prefixes: Any = None,
) -> tuple[tuple[int, ...], ...]:
    """Divide samples of these ``lengths`` (tokens) over data-parallel replicas by the seconds that
    they take: the longest first, each to the replica that is done first, as --epp divides.

    Returns the numbers of every replica's samples, in the order given; each has one at least. For
    loops that divide by themselves; imports no torch.

    model        a name of the catalogue (``python -m megatron_epp plan --help``), or a JSON file
    device       the same, of devices
    profile      a file that ``python -m megatron_epp profile`` measured, in the place of the
                 device's assumptions
    same_count   as many samples on every replica, as loops want whose steps count them
    prefixes     what ``megatron_epp.corpus.shared_prefixes.shared_prefixes`` finds in the samples:
                 what they share is computed once on each replica that has any of them, and so
                 paid again where a group is split

    A ValueError says in one line what cannot be divided.
    """
    from megatron_epp.planner.division import divided

    return divided(lengths, replicas, model, device, profile, same_count, prefixes)


def attach(
    model_chunks: Any,
    adapter: Any,
    *,
    attention: str = "auto",
    head_again: bool = True,
    memory_gib: float | None = None,
) -> Any:
    """Cut the documents of a training loop's micro-batches: slices in any loop.

    Call it once the model is built (and wrapped): every pass of the loop over this model through
    ``get_forward_backward_func`` is then run in slices, losses that need whole documents included.
    ``install_schedule`` is called with its defaults where it was not.

    model_chunks   the loop's model, or its list of one: whatever is or holds a GPTModel or a
                   HybridModel of Megatron's, or a subclass
    adapter        lengths, rows and loss of micro-batches (mcore/loops/adapter.py);
                   mcore/loops/adapters has two for common forms
    attention      as --epp-attention
    head_again     the output layer of slices runs again in the backward; else logits are kept
    memory_gib     what a stage may hold for chunks between forward and backward, estimated from the
                   model's shape: layers are then recomputed per stage and chunk, where that fills
                   it, in the place of the model's own recompute of whole layers (of whole
                   micro-batches, too, where there are several stages). Default: as many tokens as
                   Megatron's 1F1B would hold, recomputed as the model says

    Returns an object with ``adapter``, which another pass may replace, and ``slicing``, which False
    turns off: whole micro-batches then. A ValueError says in one line what cannot be cut.
    """
    from megatron_epp.mcore.loops.attached import attach_to
    from megatron_epp.mcore.loops.install import installed

    attached = attach_to(model_chunks, adapter, attention, head_again, memory_gib)
    if installed() is None:
        install_schedule()
    return attached
