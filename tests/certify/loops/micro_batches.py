"""Random micro-batches, losses and random plans for certificates of external training loops.

    loss        loss function returns        Megatron scales the loss to
    tokens      sum, tokens, ...             sum / all tokens, or mean / micro-batches
    mean        mean, ...                    mean / micro-batches
    sequence    mean of x, ...               mean / micro-batches
    sequences   sum of x, sequences, ...     sum / all sequences

The last item ``...`` is a dictionary to log. "All" counts tokens or sequences of all micro-batches,
by which Megatron divides with calculate_per_token_loss. x is the mean, over the tokens of a
sequence, of a clipped-ratio loss, as in PPO, plus a divergence. In shapes, B is the number of
samples of a micro-batch, and S the number of tokens to which all samples are padded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import numpy
import torch
from torch import Tensor

from megatron_epp.certify.batches import CONTEXT, MASKED
from megatron_epp.ir import (
    KEEP,
    Chunk,
    Kind,
    Op,
    Plan,
    Prefixes,
    Span,
    needs_of,
    rules_for,
    slices_of,
)
from megatron_epp.ir.random_plan import arbitrary_chunks, by_stage, random_walk
from megatron_epp.ir.recompute import MLP_RECOMPUTED
from megatron_epp.planner.calls.call_cost import CallDocuments
from tests.certify.frame import CheckedFrame, traffic_of
from tests.certify.loops.loop_results import LoopCoverage, LoopResult
from tests.certify.trees import tree_chunks

LOSSES = ("tokens", "mean", "sequence")
COUNTED = ("tokens", "sequences")  # losses with a count, for a mean over all micro-batches
CLIP, DIVERGENCE = 0.2, 0.1
MULTIPLE = 4  # of rows, which tensor-parallel ranks share
PIXELS = 3  # numbers per token for an encoder
MicroBatch = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DrawnMicroBatches:
    """Micro-batches, by replica and number, and the name of their loss function."""

    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    loss: str


@dataclass(frozen=True, slots=True)
class LoopFrame:
    """External training loop for which batches are drawn.

    Attributes:
        model: model and parallel sizes; may draw prefixes.
        per_token: value of Megatron's calculate_per_token_loss.
        pixels: whether micro-batches contain pixels, the input of an encoder.
        turns: number of consecutive batches, of different jobs, that are drawn alike.
    """

    model: CheckedFrame
    per_token: bool
    pixels: bool = False
    turns: int = 1

    def draw(self, seed: int, number: int) -> DrawnMicroBatches:
        """Return batch ``number``, which is the same in every process."""
        number //= self.turns
        random = Random(f"loop {seed} {number}")
        generator = numpy.random.default_rng([seed, number, 7])
        losses = COUNTED if self.per_token else LOSSES
        loss = losses[number % len(losses)]
        calls = []
        for _ in range(self.model.replicas):
            count = random.randint(2, 6)
            lengths = [_lengths(random) for _ in range(count)]
            drawn = [_micro_batch(one, loss, generator, self) for one in lengths]
            if self.model.trees:
                for one in drawn:
                    _begin_alike(one, random)
            calls.append(tuple(drawn))
        return DrawnMicroBatches(tuple(calls), loss)

    def coverage(self, drawn: DrawnMicroBatches, computed: Sequence[LoopResult]) -> LoopCoverage:
        """Return the numbers of micro-batches, chunks and split backwards of a batch."""
        count = sum(map(len, drawn.micro_batches))
        replicas = {one.replica: one for one in computed}.values()
        chunks = sum(one.chunks for one in replicas)
        cut = chunks - count if replicas else 0
        halved, branches = (
            sum(getattr(one, name) for one in replicas) for name in ("halved", "branches")
        )
        counts = chunks, cut, halved, branches
        return LoopCoverage(drawn.loss, count, *counts, **traffic_of(computed))


def _lengths(random: Random) -> tuple[int, ...]:
    """Return the sample lengths of a micro-batch: one long sample, or one to three shorter ones."""
    if random.random() < 0.4:
        return (random.randint(CONTEXT // 2, CONTEXT - 1),)
    return tuple(random.randint(2, CONTEXT // 2) for _ in range(random.randint(1, 3)))


def _micro_batch(
    lengths: tuple[int, ...], loss: str, generator: numpy.random.Generator, frame: LoopFrame
) -> MicroBatch:
    # Padded, because sequence parallelism shards the rows.
    samples, rows = len(lengths), -(-max(lengths) // MULTIPLE) * MULTIPLE
    tokens = torch.from_numpy(generator.integers(0, frame.model.vocabulary, (samples, rows + 1)))
    mask = torch.from_numpy((generator.random((samples, rows)) >= MASKED).astype(float))
    for sample, length in enumerate(lengths):
        if sample % 2:  # a prompt has no loss
            mask[sample, : int(generator.integers(0, length))] = 0
        mask[sample, length - 1] = 1  # every sequence has a label with a loss
        mask[sample, length:] = 0
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "position_ids": torch.arange(rows).repeat(samples, 1),
        "attention_mask": torch.ones(1, 1, rows, rows, dtype=torch.bool).triu(1),
        "loss_mask": mask,
        "old_losses": torch.from_numpy(4.1 + 0.3 * generator.standard_normal((samples, rows))),
        "advantages": torch.from_numpy(generator.standard_normal(samples)),
        "lengths": lengths,
        "loss": loss,
        **({"pixels": _pixels(samples, rows, generator)} if frame.pixels else {}),
    }


def _begin_alike(batch: MicroBatch, random: Random) -> None:
    """Copy a random number of first tokens and labels to each sample from an earlier sample."""
    for sample in range(1, len(batch["lengths"])):
        other = random.randrange(sample)
        most = min(batch["lengths"][sample], batch["lengths"][other])
        shared = random.choice((0, most, random.randint(0, most)))
        for name in ("tokens", "labels"):
            batch[name][sample, :shared] = batch[name][other, :shared]


def _pixels(samples: int, rows: int, generator: numpy.random.Generator) -> Tensor:
    return torch.from_numpy(generator.standard_normal((samples, rows, PIXELS)))


def loop_forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
    """Run ``model`` on the next micro-batch; return its output and loss function, as loops do."""
    batch = next(data_iterator)
    output = model(
        batch["tokens"],
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch["labels"],
        packed_seq_params=batch.get("packed_seq_params"),
    )
    return output, partial(loop_loss, batch)


def loop_loss(batch: MicroBatch, token_losses_BS: Tensor, non_loss_data: bool = False) -> Any:
    """Compute the loss of a micro-batch from its token losses; return a tuple as in the table.

    The table is in this module's docstring. The loop collects the last item of the tuple. With
    ``non_loss_data``, return the sum of the losses instead.
    """
    mask_BS = batch["loss_mask"].to(token_losses_BS.dtype)
    if non_loss_data:
        return (token_losses_BS * mask_BS).sum().item()
    if batch["loss"] == "tokens":
        total = (token_losses_BS * mask_BS).sum()
        return total, mask_BS.sum().to(torch.int), {"value": total.detach().item()}
    if batch["loss"] == "mean":
        value = (token_losses_BS * mask_BS).sum() / mask_BS.sum()
    else:
        each_B = clipped(batch, token_losses_BS, mask_BS)
        if batch["loss"] == "sequences":
            total = each_B.sum()
            count = torch.tensor(len(each_B), dtype=torch.int, device=total.device)
            return total, count, {"value": total.detach().item()}
        value = each_B.mean()
    return value, {"value": value.detach().item()}


def clipped(batch: MicroBatch, token_losses_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """Return [B]: mean of clipped-ratio loss plus divergence over each sequence's loss tokens."""
    difference_BS = batch["old_losses"].to(token_losses_BS.dtype) - token_losses_BS
    ratio_BS = difference_BS.exp()
    advantage_B1 = batch["advantages"].to(token_losses_BS.dtype)[:, None]
    gain_BS = torch.minimum(
        ratio_BS * advantage_B1, ratio_BS.clamp(1 - CLIP, 1 + CLIP) * advantage_B1
    )
    divergence_BS = (-difference_BS).exp() + difference_BS - 1
    each_BS = (DIVERGENCE * divergence_BS - gain_BS) * mask_BS
    return each_BS.sum(1) / mask_BS.sum(1)


def arbitrary_sliced_plans(
    calls: Sequence[CallDocuments],
    layers: Sequence[int],
    random: Random,
    split: bool,
    forward_only: bool,
    modes: str,
    cut: bool = True,
) -> tuple[Plan, ...]:
    """Return plans with documents sliced, packed, ordered and recomputed at random.

    Every chunk belongs to one micro-batch. Plans of several replicas, which run in lockstep, have
    one op template. A chunk of one replica may run beside any chunk of another, or an empty one.

    Args:
        calls: documents of the micro-batches of each replica.
        layers: number of layers of every stage.
        random: random generator.
        split: whether backwards may be split into I and W.
        forward_only: whether the call has no backwards.
        modes: recompute modes to draw from.
        cut: whether documents are sliced; otherwise every micro-batch is one chunk.
    """
    drawn = [_drawn_chunks(call, random, cut) for call in calls]
    count = max(len(chunks) for chunks, _ in drawn) + (len(calls) > 1 and random.randint(0, 1))
    names = random.sample(range(count), count)
    again = [
        [[random.choice(modes) in MLP_RECOMPUTED for _ in range(layer)] for _ in range(count)]
        for layer in layers
    ]
    kinds = [[mode for mode in modes if (mode in MLP_RECOMPUTED) == runs] for runs in (False, True)]
    bare = []
    for replica, (call, (chunks, prefixes)) in enumerate(zip(calls, drawn, strict=True)):
        documents = tuple(length for of in call.lengths for length in of)
        placed = [Chunk(())] * count
        for at, chunk in zip(sorted(random.sample(range(count), len(chunks))), chunks, strict=True):
            placed[names[at]] = chunk
        recompute = tuple(
            tuple("".join(random.choice(kinds[run]) for run in of_chunk) for of_chunk in of_stage)
            for of_stage in again
        )
        orders: tuple[tuple[Op, ...], ...] = tuple(() for _ in layers)
        bare.append(
            Plan(
                documents,
                tuple(layers),
                tuple(placed),
                recompute,
                orders,
                replica,
                len(calls),
                prefixes=prefixes,
            )
        )
    orders = _orders(bare, calls, random, split, forward_only)
    return tuple(replace(plan, orders=orders) for plan in bare)


def _drawn_chunks(call: CallDocuments, random: Random, cut: bool) -> tuple[list[Chunk], Prefixes]:
    """Return random chunks of a replica's micro-batches, in an order that can run, and prefixes."""
    chunks: list[Chunk] = []
    prefixes: list[Span | None] = []
    first = 0
    for number, of in enumerate(call.lengths):
        within = [
            None if parent < 0 else Span(parent, 0, of[parent])
            for parent in (call.parents[number] if call.parents else (-1,) * len(of))
        ]
        if not cut:
            chunks.append(Chunk(tuple(Span(first + n, 0, length) for n, length in enumerate(of))))
        elif any(within):
            chunks += tree_chunks(of, tuple(within), random, first)
        else:
            chunks += arbitrary_chunks(of, random, first)
        prefixes += [p and replace(p, document=first + p.document) for p in within]
        first += len(of)
    random.shuffle(chunks)
    documents = tuple(length for of in call.lengths for length in of)
    recompute = ((KEEP,) * len(chunks),)
    plan = Plan(documents, (1,), tuple(chunks), recompute, ((),), prefixes=tuple(prefixes))
    return [chunks[op.chunk] for op in _forward_walk([plan], random)], tuple(prefixes)


def _orders(
    bare: Sequence[Plan],
    calls: Sequence[CallDocuments],
    random: Random,
    split: bool,
    forward_only: bool,
) -> tuple[tuple[Op, ...], ...]:
    """Return random orders of the ops of all stages that respect the dependencies of all plans.

    On the last stage, all forwards of a micro-batch precede its backwards, because its loss needs
    the outputs of all its chunks.
    """
    if forward_only:
        return (_forward_walk(bare, random),) * bare[0].stages
    fraction = random.choice((0.0, 0.5, 1.0)) if split else 0.0
    mates: list[dict[int, set[Op]]] = []  # by replica and chunk: forwards of its micro-batch
    for plan, call in zip(bare, calls, strict=True):
        of_document = [number for number, of in enumerate(call.lengths) for _ in of]
        group_of = {
            n: of_document[c.spans[0].document] for n, c in enumerate(plan.chunks) if c.spans
        }
        mates.append(
            {
                chunk: {Op(Kind.FORWARD, c) for c, other in group_of.items() if other == group}
                for chunk, group in group_of.items()
            }
        )
    needs = [needs_of(plan, rules_for(False)) for plan in bare[1:]]

    def met(stage: int, op: Op, finished: Sequence[set[Op]]) -> bool:
        needs_losses = stage == bare[0].stages - 1 and op.kind in (Kind.BACKWARD, Kind.INPUT)
        if needs_losses and not all(of.get(op.chunk, set()) <= finished[stage] for of in mates):
            return False
        return all(
            any(one in finished[where] for one in ops)
            for of_replica in needs
            for _, where, ops in of_replica(stage, op)
        )

    return by_stage(bare[0], list(random_walk(bare[0], random, fraction, met)))


def _forward_walk(plans: Sequence[Plan], random: Random) -> tuple[Op, ...]:
    """Return all forwards in a random order, each slice after its document's earlier slices."""
    earlier = [slices_of(plan).earlier for plan in plans]
    done = {-1}
    ops = []
    for _ in plans[0].chunks:
        able = [
            chunk
            for chunk in range(len(plans[0].chunks))
            if chunk not in done and all(of[chunk] in done for of in earlier)
        ]
        ops.append(Op(Kind.FORWARD, random.choice(able)))
        done.add(ops[-1].chunk)
    return tuple(ops)
