"""Elastic pipeline parallelism for Megatron-LM: every iteration runs a plan for its documents."""

from collections.abc import Callable, Sequence
from typing import Any

__version__ = "0.1.0"  # pyproject.toml and the test of CITATION.cff read it here


def add_arguments(parser: Any) -> Any:
    """Add the ``--epp`` flags to Megatron's parser, as an ``extra_args_provider``.

    Example::

        args = parse_args(extra_args_provider=megatron_epp.add_arguments)
    """
    from megatron_epp.mcore.job.read_flags import with_our_flags

    return with_our_flags(parser)


def install(
    args: Any,
    model_config: Any,
    items: Callable[[Sequence[int | None]], Sequence[Any]] | None = None,
) -> tuple[Any, Any]:
    """Install elastic pipelines in Megatron's trainer, for entry scripts of your own.

    Call it after parsing the flags and before ``pretrain``. On a CPU-only host call
    :func:`prepare_host` before the first import of Megatron.

    Args:
        args: Megatron's arguments, including those of :func:`add_arguments`.
        model_config: what ``gpt_config_from_args`` or ``hybrid_config_from_args`` returns for them.
        items: returns your own documents in place of --data-path. It is called with the numbers of
            samples that training, validation and test want (None: one epoch), and returns a dataset
            or None for each. A dataset has a length and ``original_seq_lens``, the length of every
            item. Its items are mappings with tokens, labels, loss_mask and original_seq_len
            (docs/guides/data.md).

    Returns:
        The forward step and the data provider to pass to ``pretrain``.

    Raises:
        ValueError: one line on what cannot run.

    Example::

        forward_step, datasets = megatron_epp.install(args, gpt_config_from_args(args))
        pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
    """
    from megatron_epp.mcore.patching import patch_points
    from megatron_epp.mcore.trainer import setup
    from megatron_epp.mcore.trainer.hooks import TrainerHooks

    patch_points.install(patch_points.ALWAYS_PATCH_POINTS)
    patch_points.install(patch_points.EPP_PATCH_POINTS)
    return setup.setup(args, model_config, TrainerHooks(items=items))


def prepare_host() -> bool:
    """Make Megatron run on a CPU-only host, and return whether this is one.

    Example::

        megatron_epp.prepare_host()  # before the first import of Megatron
    """
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
    """Run the micro-batches of any training loop by plans (scheduling mode).

    It replaces the functions that ``megatron.core.pipeline_parallel.get_forward_backward_func``
    returns. The loop does not change: forward step, iterator, model, losses and the order of
    results stay. Each micro-batch is one chunk. Times measured in earlier calls choose the order of
    micro-batches and which backwards are split. Memory stays within what Megatron's 1F1B would hold
    on its fullest rank, in this call or an earlier one.

    If a plan gains nothing, Megatron's order runs. Calls that plans do not support, such as CUDA
    graphs, are left to Megatron, which is logged once. A Megatron before 0.16 keeps its own
    schedule: a warning, and ``reason`` of the returned object, say why. A loop that stores the
    schedule function must be built after this call.

    Args:
        lengths: maps a micro-batch of the iterator to the rows of its hidden states over all ranks
            of a stage, including padding. It may also return a MicrobatchShape
            (planner/calls/microbatch.py), or None if it does not know. It is needed if
            ``variable_seq_lengths`` is on and micro-batches are not mappings with ``tokens`` or
            ``input_ids``; else Megatron's schedule runs such calls.
        reorder: whether micro-batches may run in another order (never with MoE).
        split_backward: whether backwards may be split into input and weight gradients. None: with
            Megatron's local layers, but not with Transformer Engine's.
        headroom: memory above Megatron's 1F1B on its fullest rank, as a fraction.
        timeout: ``datetime.timedelta`` that a rank waits for another; default 10 minutes.
        observe: called after every call with its plan, records and memory peak (loops/settings.py).

    Returns:
        An object whose ``remove()`` restores Megatron's schedules; also a context manager.

    Raises:
        ValueError: one line on what cannot be used.

    Example::

        megatron_epp.install_schedule()  # once, before the loop asks for its schedule
        forward_backward = get_forward_backward_func()
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
    """Compute log-probabilities of tokens without materialising the model's logits.

    At most a block of rows of logits is alive at once, in forward and backward. Use it in a forward
    step in place of ``model(**inputs)``, under any schedule, with or without :func:`attach`. The
    model is, or holds, Megatron's GPTModel or HybridModel. Softmax runs over all vocabulary entries
    including padding, as in Megatron's loss.

    Args:
        model: the model.
        labels: [B, S], the token that each position predicts; with context parallelism those of
            this rank. None is allowed except on the last stage.
        temperature: divisor of the logits: a number, or a tensor that expands to [B, S].
        entropy: whether to return entropies too.
        inputs: arguments of the model's forward, without labels.

    Returns:
        On the last stage, log-probabilities [B, S] in float32 (float64 for a float64 model). With
        ``entropy``, a pair of them and the entropies [B, S] of the distributions. Both are
        differentiable. On other stages, the model's output.

    Raises:
        ValueError: if labels have another shape, or the LM head has a bias or adapters, or the
            model has multi-token prediction.

    Example::

        def forward_step(data_iterator, model):
            batch = next(data_iterator)
            output = megatron_epp.log_probs(
                model,
                batch["labels"],
                input_ids=batch["tokens"],
                position_ids=batch["position_ids"],
                attention_mask=None,
            )
            return output, partial(policy_loss, batch)
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
    """Divide samples over data-parallel replicas by their predicted time.

    The longest sample goes first, each to the replica that finishes first, as --epp divides
    documents. It is for loops that assign samples themselves, and imports no torch.

    Args:
        lengths: tokens of every sample.
        replicas: number of replicas.
        model: name in the catalogue (``python -m megatron_epp plan --help``), or a JSON file.
        device: name in the catalogue of devices, or a JSON file.
        profile: file that ``python -m megatron_epp profile`` wrote; replaces the device's analytic
            cost model.
        same_count: whether every replica gets equally many samples.
        prefixes: result of ``megatron_epp.corpus.shared_prefixes.shared_prefixes`` for the samples.
            A prefix is computed once on each replica that has a sample with it.

    Returns:
        The indices of every replica's samples in ascending order, at least one per replica.

    Raises:
        ValueError: one line on what cannot be divided.

    Example::

        local_samples = megatron_epp.divide(lengths, dp_size, model="llama3-8b")[dp_rank]
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
    """Run a training loop's micro-batches in slices of documents (slicing mode).

    Call it once the model is built and wrapped. Every pass over this model through
    ``get_forward_backward_func`` then runs in slices, including losses that need unsliced
    documents. It calls :func:`install_schedule` with its defaults if that was not called.

    Args:
        model_chunks: the loop's model, or a list of one: a GPTModel or HybridModel of Megatron, a
            subclass, or a module that holds one.
        adapter: lengths, rows and loss of micro-batches (mcore/loops/adapter.py);
            mcore/loops/adapters has two for common forms.
        attention: kernels, as --epp-attention.
        head_again: whether the LM head of slices is recomputed in the backward; else logits are
            saved.
        memory_gib: memory of a stage's chunks between forward and backward, estimated from the
            model's shape. Layers are recomputed per stage and chunk as needed, instead of the
            model's own recompute of whole layers. Default: as many tokens as Megatron's 1F1B holds,
            recomputed as the model says.

    Returns:
        An object with ``adapter``, which another pass may replace, and ``slicing``; False turns
        slices off.

    Raises:
        ValueError: one line on what cannot be sliced.

    Example::

        from megatron_epp.mcore.loops.adapters.samples import Samples

        attached = megatron_epp.attach(model, Samples(loss))
    """
    from megatron_epp.mcore.loops.attached import attach_to
    from megatron_epp.mcore.loops.install import installed

    attached = attach_to(model_chunks, adapter, attention, head_again, memory_gib)
    if installed() is None:
        install_schedule()
    return attached
