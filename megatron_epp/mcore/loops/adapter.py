"""Adapters of slicing mode: functions that split a loop's micro-batches into documents."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_epp.corpus.shared_prefixes import PrefixForest, shared_prefixes


class Adapter(Protocol):
    """Protocol of objects that split micro-batches into documents for :func:`megatron_epp.attach`.

    A micro-batch is any value that the loop's iterator yields. In shapes, L is the number of tokens
    of a document, and t the number of tokens of a slice.

    Some models have modules before the layers that need the full document, such as an image
    encoder. The adapter of such a model has a fourth function:

        inputs(micro_batch, document) -> arguments of the model's forward by name, for a full
                                         document, including its images

    ``inputs`` is called once per document, on every rank of every stage. The model runs on the
    returned arguments up to the layers. Slices are then cut out of the arguments of the layers:
    embeddings, and positions with several axes [axes, 1, L]. Without ``inputs``, the modules
    before the layers receive one slice of text at a time, and the positions of a token are equal
    on all axes.

    With ``attach(share_from=N)``, documents that begin with the same N or more tokens, such as
    answers to one question, compute this prefix once, from the ``rows`` of one of them. ``loss``
    receives the outputs of every full document, so ``loss`` decides how many times a prefix counts.
    The rows of a prefix are equal in all its documents, except for the keys that only the loss
    reads. The attribute ``loss_keys`` names these keys, by default ``loss_mask``. An adapter that
    knows the shared prefixes without a comparison may have the function

        prefixes(micro_batch) -> the documents as a forest (corpus/shared_prefixes.py)

    With context parallelism, ``loss`` is called on each rank with full documents. If the loop's
    loss function returns only the loss of the rank's own shard, set

        partial_loss = True

    The gradients with respect to ``outputs`` and the token counts are then summed over the
    context-parallel ranks.

    If the forward step returns logits, or builds its micro-batches from the data that it draws,
    it cannot draw slices from its iterator. The adapter of such a loop has the function

        sliced(forward_step, model) -> the forward step that computes slices instead

    ``sliced`` is called at the start of every call of the schedule. ``loss`` may then get the
    loop's own loss function from :func:`loss_function_of`.
    """

    def lengths(self, micro_batch: Any) -> Sequence[int]:
        """Return the number of tokens of every document; attention stays within a document."""

    def rows(
        self, micro_batch: Any, document: int, start: int, stop: int
    ) -> Mapping[str, Tensor | None]:
        """Return tokens [start, stop) of a document as tensors [1, t, ...] for the forward step.

        The schedule concatenates the rows of several slices. Labels follow the full document: the
        label of a slice's last token is the first token of the document's next slice. The schedule
        sets positions and attention, and ignores position ids and attention masks in the rows.
        With context parallelism, each rank draws a contiguous part of these rows, and the forward
        step must not shard the drawn rows again.

        Args:
            micro_batch: The micro-batch.
            document: Index of the document in the micro-batch.
            start: First token of the slice.
            stop: End of the slice (exclusive).

        Returns:
            The tensors by name. The value of a tensor that this stage does not have is None.
        """

    def loss(self, micro_batch: Any, outputs: Sequence[Tensor], non_loss_data: bool = False) -> Any:
        """Return the result of the loop's loss function for the whole micro-batch.

        Args:
            micro_batch: The micro-batch.
            outputs: The forward step's outputs of each document, all slices concatenated: [L, ...].
            non_loss_data: Whether the loop collects results other than losses. The result may then
                be any value, which the schedule appends to its results.

        Returns:
            (loss, report) or (loss, tokens, report), as Megatron's schedules accept.
        """


@dataclass(frozen=True, slots=True)
class ModelStandIn:
    """Stand-in for a loop's ``model``: it has the model's attributes, and a call returns None."""

    model: Any

    def __call__(self, *any: Any, **named: Any) -> None:
        """Return None."""
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def loss_function_of(
    forward_step: Callable[..., Any], source: Any, model: Any
) -> Callable[..., Any]:
    """Return the loss function of a loop's ``forward_step``, without running the model's forward.

    The forward step is called with a :class:`ModelStandIn` and draws its micro-batch from
    ``source``.
    """
    function: Callable[..., Any] = forward_step(source, ModelStandIn(model))[1]
    return function


def refuse_asked(whose: str, who: str, asked: Mapping[str, bool]) -> None:
    """Raise a ValueError if an option in ``asked`` is true, because slices do not support it.

    Args:
        whose: Name of the framework, used in the message.
        who: Subject and verb of the message, such as "it asks"; "for" and the option follow.
        asked: Maps the description of each option to whether the option is set.
    """
    if what := next((what for what, wanted in asked.items() if wanted), None):
        raise ValueError(
            f"slices of {whose} micro-batches: {who} for {what}; leave it out, or use Megatron's "
            "own schedule (no attach)"
        )


LOSS_KEYS = ("loss_mask",)


def _shared_prefixes(
    adapter: Adapter, micro_batch: Any, number: int, lengths: Sequence[int], least: int
) -> PrefixForest:
    """Compare the rows of documents; return their forest with prefixes of ``least`` or more."""
    rows = []
    for document, length in enumerate(lengths):
        drawn = _compared(adapter, rows_of(adapter, micro_batch, number, document, 0, length))
        # float64 represents tokens and labels exactly up to 2^53.
        columns = [one[0].reshape(length, -1).double() for one in drawn.values()]
        rows.append(torch.cat(columns, dim=1).cpu().numpy())
    return shared_prefixes(rows, least)


def _compared(adapter: Any, rows: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return the rows that may affect a token's output or label: all except ``loss_keys``."""
    left_out = getattr(adapter, "loss_keys", LOSS_KEYS)
    return {name: x for name, x in rows.items() if x is not None and name not in left_out}


def parts_of(
    micro_batch: Mapping[str, Any], keys: Iterable[str], where: tuple[slice, slice]
) -> dict[str, Tensor | None]:
    """Return the entries ``keys`` [B, S, ...] of a micro-batch, indexed with ``where``.

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
        number: Number of the micro-batch, used in messages.
        document: Index of the document in the micro-batch.
        start: First token of the slice.
        stop: End of the slice (exclusive).

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

    The padding repeats the last row, which is a valid input of the model. If the tensor of a name
    is None in any slice, the result is None for this name.
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


def forest_of(
    adapter: Adapter, micro_batch: Any, number: int, most: int, least: int = 0
) -> PrefixForest:
    """Return the documents of a micro-batch with the prefixes that they share.

    Args:
        adapter: The adapter.
        micro_batch: The micro-batch.
        number: Number of the micro-batch, used in messages.
        most: Maximum number of tokens of a document.
        least: Minimum number of tokens of a shared prefix; 0 disables sharing. It has no effect if
            the adapter has a function ``prefixes``.

    Raises:
        ValueError: Lengths or rows are invalid, ``prefixes`` does not return a PrefixForest of
            these lengths, or the rows of a shared prefix differ between the documents that share
            it.
    """
    lengths = lengths_of(adapter, micro_batch, number, most)
    find = getattr(adapter, "prefixes", None)
    if find is None and not least:
        return PrefixForest.apart(lengths)
    if find is None:
        return _shared_prefixes(adapter, micro_batch, number, lengths, least)
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
    """Raise a ValueError if rows of a shared prefix differ. Synchronises with the device once."""
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
        number: Number of the micro-batch, used in messages.
        most: Maximum number of tokens of a document.

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
