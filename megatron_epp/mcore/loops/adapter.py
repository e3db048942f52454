"""Three functions by which slices know the micro-batches of a loop of others, and a fourth for
models that see documents whole before their layers do."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_epp.corpus.shared_prefixes import PrefixForest, shared_prefixes


class Adapter(Protocol):
    """Tells a loop's micro-batches apart into documents, for :func:`megatron_epp.attach`.

    A micro-batch is whatever the loop's iterator gives. L tokens of a document, t of a slice.

    Where something stands in front of the layers that wants a document whole, as an encoder of
    pictures does, there is a fourth function:

        inputs(micro_batch, document) -> arguments of the model's forward for all of a document,
                                         by name, its pictures among them

    It is called once for a document, on every rank of every stage, and the model runs with them up
    to its layers; slices are cut out of what reaches these: embeddings, and positions of several
    axes [axes, 1, L]. Without it, what stands in front sees slice after slice: of text, where a
    token's place is its position on every axis.

    Where documents begin alike, as answers to one question do, there may be a function

        prefixes(micro_batch) -> what shared_prefixes(rows of every document) finds
                                 (megatron_epp.corpus.shared_prefixes)

    What several share is then computed once, drawn as rows of one of them; ``loss`` gets outputs of
    every document whole, so that it decides how often they count. All that rows of them draw must
    be equal, but for what the loss alone reads: the names in ``loss_keys``, by default a loss mask.

    Over context-parallel ranks ``loss`` is called on each, and is of whole documents. Where that of
    a loop is of a rank's own part, there is

        partial_loss = True

    and gradients with respect to ``outputs`` are added up over these ranks, and so are tokens.

    Where the loop's forward step returns logits, or makes its micro-batches of what it draws, a
    slice cannot be drawn by it. Then there is a function

        sliced(forward_step, model) -> the forward step that computes slices in its place

    called at the start of every call to the schedule. ``loss`` may then ask the loop's own for its
    loss function (:func:`loss_function_of`).
    """

    def lengths(self, micro_batch: Any) -> Sequence[int]:
        """Tokens of every document: within each, tokens attend to those before them."""

    def rows(
        self, micro_batch: Any, document: int, start: int, stop: int
    ) -> Mapping[str, Tensor | None]:
        """Tokens [start, stop) of a document as the loop's forward step draws them: [1, t, ...]
        each, on the stages that have them. Several slices are put one behind the other.

        Labels are those of the whole document: the last token of a slice predicts the first of the
        next. Positions and attention follow from the slice; nobody reads those that are given.
        Where context-parallel ranks share a document, each draws some of these rows, one behind the
        other: its forward step takes no part of its own.
        """

    def loss(self, micro_batch: Any, outputs: Sequence[Tensor], non_loss_data: bool = False) -> Any:
        """Return the result of the loop's loss function for the whole micro-batch.

        outputs[d] [L, ...] are the forward step's outputs for document d, whole, whatever slices
        they came from. Returns what Megatron's schedules take: (loss, report), or (loss, tokens,
        report); with ``non_loss_data`` anything, which is collected.
        """


@dataclass(frozen=True, slots=True)
class ModelStandIn:
    """A loop's ``model`` to all who ask it, which computes nothing when it is called."""

    model: Any

    def __call__(self, *any: Any, **named: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def loss_function_of(
    forward_step: Callable[..., Any], source: Any, model: Any
) -> Callable[..., Any]:
    """The loss function that a loop's ``forward_step`` returns for the micro-batch which it draws
    from ``source``, without the forward."""
    function: Callable[..., Any] = forward_step(source, ModelStandIn(model))[1]
    return function


def refuse_asked(whose: str, who: str, asked: Mapping[str, bool]) -> None:
    """ValueError: slices do not give something that is ``asked`` for."""
    if what := next((what for what, wanted in asked.items() if wanted), None):
        raise ValueError(
            f"slices of {whose} micro-batches: {who} for {what}; leave it out, or run whole "
            "micro-batches (install_schedule)"
        )


LOSS_KEYS = ("loss_mask",)


def shared_prefixes_of(adapter: Any, micro_batch: Any, least: int) -> PrefixForest:
    """Documents of a micro-batch, by ``lengths`` and ``rows`` of an adapter, and what they share
    from ``least`` tokens on: begins for which equal rows are drawn. 0: nothing is shared."""
    lengths = adapter.lengths(micro_batch)
    if not least:
        return PrefixForest.apart(lengths)
    rows = []
    for document, length in enumerate(lengths):
        drawn = _compared(adapter, adapter.rows(micro_batch, document, 0, length))
        # As float64, which tells tokens and labels up to 2^53 apart.
        columns = [one[0].reshape(length, -1).double() for one in drawn.values()]
        rows.append(torch.cat(columns, dim=1).cpu().numpy())
    return shared_prefixes(rows, least)


def _compared(adapter: Any, rows: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Those that outputs of a token may depend on, as they do on its label."""
    left_out = getattr(adapter, "loss_keys", LOSS_KEYS)
    return {name: x for name, x in rows.items() if x is not None and name not in left_out}


def parts_of(
    micro_batch: Mapping[str, Any], keys: Iterable[str], where: tuple[slice, slice]
) -> dict[str, Tensor | None]:
    """The part of the tensors ``keys`` [B, S, ...] at ``where``, as far as the micro-batch has
    them."""
    return {
        key: None if micro_batch[key] is None else micro_batch[key][where]
        for key in keys
        if key in micro_batch
    }


def rows_of(
    adapter: Adapter, micro_batch: Any, number: int, document: int, start: int, stop: int
) -> Mapping[str, Tensor | None]:
    """``adapter.rows``. ValueError: a tensor has other rows than were asked for."""
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
    """Slices one behind the other, [1, rows, ...] each; behind them, up to ``rows``, the last row
    again: whatever it holds, a model can compute."""
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
    """Documents of a micro-batch, and what they share by the adapter's ``prefixes``, if it has that
    function. ValueError: as :func:`lengths_of`; what it finds to be shared is not, or not alike."""
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
    """ValueError: rows that documents are said to share differ. One look at the device where they
    do not."""
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
    """``adapter.lengths``. ValueError: they are no lengths of documents of up to ``most``."""
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
