"""Elastic pipeline parallelism for Megatron-LM: every iteration runs a plan for its documents."""

from collections.abc import Callable, Sequence
from typing import Any

__version__ = "0.1.0"  # pyproject.toml and the test of CITATION.cff read it here


def add_arguments(parser: Any) -> Any:
    """Add the ``--epp`` flags to Megatron's ``parser`` and return it (an ``extra_args_provider``).

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
    """Install elastic pipelines in Megatron's trainer, for your own entry script.

    Call this function after parsing the flags and before ``pretrain``. On a CPU-only host call
    :func:`prepare_host` before the first import of Megatron.

    Args:
        args: Megatron's arguments, including those of :func:`add_arguments`.
        model_config: result of ``gpt_config_from_args`` or ``hybrid_config_from_args`` for
            ``args``.
        items: function that returns your own documents in place of --data-path. Its argument
            contains the numbers of samples for training, validation and test (None: one epoch). It
            returns a dataset or None for each of these three. A dataset has a length, and
            ``original_seq_lens`` with the length of every item. An item is a mapping with tokens,
            labels, loss_mask and original_seq_len (docs/guides/data.md).

    Returns:
        The forward step and the data provider to pass to ``pretrain``.

    Raises:
        ValueError: the job cannot run; the message gives the reason in one line.

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
    """If this host is CPU-only, prepare Megatron for it; return whether the host is CPU-only.

    Example::

        megatron_epp.prepare_host()  # before the first import of Megatron
    """
    from megatron_epp.mcore.patching import cpu_host

    return cpu_host.install_cpu_host()


def install_schedule(*arguments: Any, **keywords: Any) -> None:
    """Raise a ValueError: :func:`attach` replaces this function of earlier versions."""
    from megatron_epp.autoload import INSTEAD

    raise ValueError(f"install_schedule(): {INSTEAD}")


def log_probs(
    model: Any,
    labels: Any,
    *,
    temperature: Any = 1.0,
    entropy: bool = False,
    **inputs: Any,
) -> Any:
    """Compute log-probabilities of tokens without materialising the model's logits.

    Forward and backward hold the logits of one block of rows at a time. Call this function in a
    forward step in place of ``model(**inputs)``, under any schedule, with or without
    :func:`attach`. Softmax runs over all vocabulary entries including padding, as in Megatron's
    loss.

    Args:
        model: Megatron's GPTModel or HybridModel, or a module that contains one.
        labels: [B, S], the token that each position predicts; with context parallelism, only the
            positions of this rank. Stages before the last may pass None.
        temperature: divisor of the logits: a number, or a tensor that expands to [B, S].
        entropy: whether to return entropies too.
        inputs: arguments of the model's forward, without labels.

    Returns:
        On the last stage, log-probabilities [B, S] in float32 (float64 for a float64 model). With
        ``entropy``, a pair: the log-probabilities, and the entropies [B, S] of the distributions.
        Both are differentiable. On other stages, the model's output.

    Raises:
        ValueError: on the last stage, labels are None or not [B, S], the temperature is not
            positive or does not expand to [B, S], the LM head has a bias or adapters, or the model
            has multi-token prediction.

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
    """Divide samples over data-parallel replicas so that predicted times are balanced.

    In order of descending length, each sample goes to the replica that then finishes first, as
    with --epp. This function is for loops that assign samples themselves. It does not
    import torch.

    Args:
        lengths: number of tokens of every sample.
        replicas: number of replicas.
        model: name in the catalogue (``python -m megatron_epp plan --help``), a JSON file, or a
            config.json of transformers.
        device: name in the catalogue of devices, or a JSON file.
        profile: file that ``python -m megatron_epp profile`` wrote; replaces the device's analytic
            cost model.
        same_count: whether every replica gets the same number of samples.
        prefixes: result of ``megatron_epp.corpus.shared_prefixes.shared_prefixes`` for the samples.
            A prefix is computed once on each replica that has a sample with this prefix.

    Returns:
        The indices of every replica's samples in ascending order, at least one per replica.

    Raises:
        ValueError: a length is below 1, there are fewer samples than replicas, ``same_count`` is
            set and the number of samples is not a multiple of ``replicas``, ``prefixes`` are not
            those of the samples, or ``model``, ``device`` or ``profile`` is unknown or invalid.

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
    share_from: int = 0,
    timeout: Any = None,
    observe: Any = None,
) -> Any:
    """Run a training loop's micro-batches in slices of documents (slicing mode).

    Call this function when the model is built and wrapped. Every pass over this model through
    ``get_forward_backward_func`` then runs in slices; losses are computed from the outputs of
    complete documents. A loop that stores the schedule function must be built after the first call.
    Megatron's own schedule runs models that are not attached, and calls that plans do not support.

    Args:
        model_chunks: the loop's model, or a list that contains only this model. The model is a
            GPTModel or HybridModel of Megatron, a subclass, or a module that contains one.
        adapter: object that splits micro-batches into documents and computes their loss
            (mcore/loops/adapter.py). The package mcore/loops/adapters has adapters for common
            training loops.
        attention: attention kernels, as in --epp-attention.
        head_again: whether the backward recomputes the LM head of slices; otherwise, logits are
            saved.
        memory_gib: limit in GiB for the activations that a stage saves from forward to backward,
            estimated from the model's shape. Plans then choose the recomputed layers of every stage
            and chunk, in place of the model's own recompute of whole layers. None: the model's own
            recompute applies, and the limit is the number of tokens that Megatron's 1F1B holds.
        share_from: minimum length in tokens of a prefix that documents of a micro-batch share, such
            as the prompt of several answers. Such a prefix, with equal tokens and labels, is
            computed once. 0 disables sharing.
        timeout: ``datetime.timedelta`` for which a rank waits for another rank; default 10 minutes.
        observe: function that is called after every call of the schedule, with the call's plan,
            records and memory peak (mcore/loops/settings.py). This and ``timeout`` apply to all
            models of the process; give them in the first call.

    Returns:
        An object with two attributes: ``adapter``, which the loop may replace for another pass, and
        ``slicing``; if it is False, every micro-batch is one chunk.

    Raises:
        ValueError: the model cannot run slices, an argument is invalid, or ``timeout`` or
            ``observe`` is given after the first call.

    Example::

        from megatron_epp.mcore.loops.adapters.samples import Samples

        attached = megatron_epp.attach(model, Samples(loss))
    """
    from megatron_epp.mcore.loops.attached import attach_to, say
    from megatron_epp.mcore.loops.install import (
        install_where_none,
        installed,
        require_megatron,
    )

    require_megatron()
    if installed() is not None and (timeout is not None or observe is not None):
        raise ValueError("attach(timeout=, observe=): expected in the process's first attach only")
    attached = attach_to(model_chunks, adapter, attention, head_again, memory_gib, share_from)
    install_where_none(timeout, observe)
    say(f"megatron_epp {__version__}: {attached}")
    return attached
