"""Adapters of slicing mode: functions that split a loop's micro-batches into documents."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_epp.corpus.shared_prefixes import PrefixForest, shared_prefixes


class Adapter(Protocol):
    """Protocol that splits a loop's micro-batches into documents, for :func:`megatron_epp.attach`.

    A micro-batch is whatever the loop's iterator yields. L tokens of a document, t of a slice.

    Models with modules before the layers that need a document unsliced, such as an image encoder,
    have a fourth function:

        inputs(micro_batch, document) -> arguments of the model's forward for all of a document,
                                         by name, its images among them

    It is called once per document, on every rank of every stage. The model runs with its result up
    to the layers, and slices are cut out of the arguments that reach them: embeddings, and
    positions of several axes [axes, 1, L]. Without the function, these modules see one slice of
    text after the other, where a token has the same position on every axis.

    Documents with a common prefix, such as answers to one question, may have a function

        prefixes(micro_batch) -> the result of shared_prefixes(rows of every document)
                                 (megatron_epp.corpus.shared_prefixes)

    A shared prefix is then computed once, drawn as rows of one of its documents. ``loss`` receives
    the outputs of every document in full, so it decides how often they count. All drawn rows of a
    prefix must be equal, except for keys that only the loss reads: ``loss_keys``, by default a loss
    mask.

    With context parallelism, ``loss`` is called on each rank with full documents. If the loop's
    loss is that of a rank's own shard, set

        partial_loss = True

    Gradients with respect to ``outputs``, and tokens, are then summed over these ranks.

    If the loop's forward step returns logits, or makes its micro-batches from what it draws, it
    cannot draw a slice. Then there is a function

        sliced(forward_step, model) -> the forward step that computes slices instead

    It is called at the start of every call to the schedule. ``loss`` may then get the loop's own
    loss function from :func:`loss_function_of`.
    """

    def lengths(self, micro_batch: Any) -> Sequence[int]:
        """Return the number of tokens of every document, within which tokens attend."""

    def rows(
        self, micro_batch: Any, document: int, start: int, stop: int
    ) -> Mapping[str, Tensor | None]:
        """Return tokens [start, stop) of a document as forward steps draw them: [1, t, ...] each.

        Only stages that have them return tensors. Several slices are concatenated. Labels are those
        of the full document: the last token of a slice predicts the first of the next. Positions
        and attention follow from the slice; given ones are ignored. Context-parallel ranks that
        share a document each draw a contiguous part of these rows, and the forward step must not
        shard them again.

        Args:
            micro_batch: The micro-batch.
            document: Document of the micro-batch.
            start: First token.
            stop: End of the tokens.

        Returns:
            The tensors by name, None on stages without them.
        """

    def loss(self, micro_batch: Any, outputs: Sequence[Tensor], non_loss_data: bool = False) -> Any:
        """Return the result of the loop's loss function for the whole micro-batch.

        Args:
            micro_batch: The micro-batch.
            outputs: Outputs of the forward step for each document: [L, ...], with the outputs of
                all slices concatenated.
            non_loss_data: Whether the result may be any value, which the schedule collects.

        Returns:
            (loss, report) or (loss, tokens, report), as Megatron's schedules accept.
        """


@dataclass(frozen=True, slots=True)
class ModelStandIn:
    """Stand-in for a loop's ``model`` with the model's attributes; calling it returns None."""

    model: Any

    def __call__(self, *any: Any, **named: Any) -> None:
        """Return None."""
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def loss_function_of(
    forward_step: Callable[..., Any], source: Any, model: Any
) -> Callable[..., Any]:
    """Run a loop's ``forward_step`` without the model's forward, and return its loss function.

    The forward step gets a :class:`ModelStandIn`, and draws its micro-batch from ``source``.
    """
    function: Callable[..., Any] = forward_step(source, ModelStandIn(model))[1]
    return function


def refuse_asked(whose: str, who: str, asked: Mapping[str, bool]) -> None:
    """Raise a ValueError if an option in ``asked`` is true, because slices do not support it.

    Args:
        whose: Name of the framework, for the message.
        who: Subject and verb of the message, before the option.
        asked: Options by their description.
    """
    if what := next((what for what, wanted in asked.items() if wanted), None):
        raise ValueError(
            f"slices of {whose} micro-batches: {who} for {what}; leave it out, or run whole "
            "micro-batches (install_schedule)"
        )


LOSS_KEYS = ("loss_mask",)


def shared_prefixes_of(adapter: Any, micro_batch: Any, least: int) -> PrefixForest:
    """Return the documents of a micro-batch and their shared prefixes of at least ``least`` tokens.

    Documents share a prefix if the adapter's ``rows`` of the prefix are equal, except for its
    ``loss_keys``. With ``least`` 0, documents share nothing, and no rows are compared.
    """
    lengths = adapter.lengths(micro_batch)
    if not least:
        return PrefixForest.apart(lengths)
    rows = []
    for document, length in enumerate(lengths):
        drawn = _compared(adapter, adapter.rows(micro_batch, document, 0, length))
        # float64 represents tokens and labels exactly up to 2^53.
        columns = [one[0].reshape(length, -1).double() for one in drawn.values()]
        rows.append(torch.cat(columns, dim=1).cpu().numpy())
    return shared_prefixes(rows, least)


def _compared(adapter: Any, rows: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return the rows that may affect a token's output, including its label."""
    left_out = getattr(adapter, "loss_keys", LOSS_KEYS)
    return {name: x for name, x in rows.items() if x is not None and name not in left_out}


def parts_of(
    micro_batch: Mapping[str, Any], keys: Iterable[str], where: tuple[slice, slice]
) -> dict[str, Tensor | None]:
    """Index the entries ``keys`` [B, S, ...] of a micro-batch with ``where``.

    Missing keys are left out; entries that are None stay None.
    """
    return {
        key: None if micro_batch[key] is None else micro_batch[key][where]
        for key in keys
        if key in micro_batch
    }


def rows_of(
    adapter: Adapter, micro_batch: Any, number: int, document: int, start: int, stop: int
) -> Mapping[str, Tensor | None]:
    """Return the checked result of ``adapter.rows``: tensors [1, stop - start, ...] by name.

    Args:
        adapter: The adapter.
        micro_batch: The micro-batch.
        number: Number of the micro-batch, for messages.
        document: Document of the micro-batch.
        start: First token.
        stop: End of the tokens.

    Raises:
        ValueError: A tensor does not have the shape [1, stop - start, ...].
    """
    rows = adapter.rows(micro_batch, document, start, stop)
    for name, tensor in rows.items():
        if tensor is not None and (tensor.dim() < 2 or tensor.shape[:2] != (1, stop - start)):
            raise ValueError(
                f"the adapter's rows of micro-batch {number}, document {document}, tokens "
                f"[{start}:{stop}]: {name!r} has shape {tuple(tensor.shape)}; expected [1, "
                f"{stop - start}, ...] (does it have as many as the adapter's lengths say? leave "
                f"{name!r} out of the keys if it has no row for each token)"
            )
    return rows


def side_by_side(
    parts: Sequence[Mapping[str, Tensor | None]], rows: int
) -> dict[str, Tensor | None]:
    """Concatenate the tensors of several slices by name, and pad them to [1, rows, ...].

    The padding repeats the last row, so that a model can compute it. A name with None in any slice
    stays None.
    """
    joined: dict[str, Tensor | None] = {}
    for name in parts[0]:
        tensors = [part[name] for part in parts]
        if any(tensor is None for tensor in tensors):
            joined[name] = None
            continue
        joined_rows = torch.cat([tensor for tensor in tensors if tensor is not None], dim=1)
        missing = rows - joined_rows.shape[1]
        if missing:
            joined_rows = torch.cat(
                [joined_rows, joined_rows[:, -1:].expand(1, missing, *joined_rows.shape[2:])], dim=1
            )
        joined[name] = joined_rows
    return joined


def forest_of(adapter: Adapter, micro_batch: Any, number: int, most: int) -> PrefixForest:
    """Return the documents of a micro-batch with the shared prefixes that the adapter finds.

    Without a function ``prefixes`` of the adapter, documents share nothing.

    Args:
        adapter: The adapter.
        micro_batch: The micro-batch.
        number: Number of the micro-batch, for messages.
        most: Most tokens of a document.

    Raises:
        ValueError: Lengths are invalid, ``prefixes`` does not return a PrefixForest of these
            lengths, or the rows of a shared prefix differ between its documents.
    """
    lengths = lengths_of(adapter, micro_batch, number, most)
    find = getattr(adapter, "prefixes", None)
    if find is None:
        return PrefixForest.apart(lengths)
    forest = find(micro_batch)
    if not isinstance(forest, PrefixForest):
        raise ValueError(
            f"the adapter's prefixes of micro-batch {number} are {type(forest).__name__}; expected "
            "what megatron_epp.corpus.shared_prefixes finds"
        )
    try:
        forest.require(lengths)
    except ValueError as error:
        raise ValueError(f"the adapter's prefixes of micro-batch {number}: {error}") from None
    _require_alike(adapter, micro_batch, number, forest)
    return forest


def _require_alike(adapter: Adapter, micro_batch: Any, number: int, forest: PrefixForest) -> None:
    """Raise a ValueError if rows of a shared prefix differ; synchronises with the device once."""
    pairs, unlike = [], []
    for document in range(len(forest.last)):
        for node in map(forest.nodes.__getitem__, forest.path(document)):
            if node.sequence == document:
                continue
            own, shared = (
                _compared(
                    adapter, rows_of(adapter, micro_batch, number, each, node.start, node.stop)
                )
                for each in (document, node.sequence)
            )
            for name in filter(shared.__contains__, own):
                pairs.append((document, node, name))
                unlike.append((own[name] != shared[name]).any())
    if unlike and bool(torch.stack(unlike).any()):
        document, node, name = next(
            pair for pair, differs in zip(pairs, unlike, strict=True) if differs
        )
        raise ValueError(
            f"the adapter's prefixes of micro-batch {number}: {name!r} of document {document} in "
            f"[{node.start}:{node.stop}] are not those of document {node.sequence}; expected equal "
            "rows (shared_prefixes finds them)"
        )


def lengths_of(adapter: Adapter, micro_batch: Any, number: int, most: int) -> tuple[int, ...]:
    """Return the checked result of ``adapter.lengths``: the tokens of every document.

    Args:
        adapter: The adapter.
        micro_batch: The micro-batch.
        number: Number of the micro-batch, for messages.
        most: Most tokens of a document.

    Raises:
        ValueError: There is no document, or a length is not between 1 and ``most``.
    """
    lengths = tuple(int(length) for length in adapter.lengths(micro_batch))
    if not lengths:
        raise ValueError(f"the adapter finds no document in micro-batch {number}; expected one")
    for document, length in enumerate(lengths):
        if not 1 <= length <= most:
            raise ValueError(
                f"the adapter says {length} tokens for document {document} of micro-batch "
                f"{number}; expected 1 to {most}, the model's positions"
            )
    return lengths
