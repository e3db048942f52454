"""Random micro-batches as loops of others make them, a loss for each, and an arbitrary plan.

    loss        returned           scaled by Megatron to
    tokens      sum, tokens, ...   sum / all tokens, or mean / micro-batches
    mean        mean, ...          mean / micro-batches
    sequence    mean over sequences of the mean of a clipped ratio and a divergence, ...
                mean / micro-batches
    sequences   the same summed, sequences, ...
                sum / all sequences

B samples of a micro-batch, S tokens of the longest, the others padded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import numpy
import torch
from torch import Tensor

from megatron_epp.certify.batches import CONTEXT, MASKED, Frame
from megatron_epp.certify.loops.results import LoopComputed, LoopCoverage
from megatron_epp.ir import KEEP, Chunk, Kind, Op, Plan, Span, slices_of
from megatron_epp.ir.random_plan import by_stage, random_walk

LOSSES = ("tokens", "mean", "sequence")
COUNTED = ("tokens", "sequences")  # what a mean over all micro-batches is taken of
CLIP, DIVERGENCE = 0.2, 0.1
MULTIPLE = 4  # of rows, where only tensor-parallel ranks share them
MicroBatch = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DrawnMicroBatches:
    """micro_batches[replica][number]; loss: of all of them, by name."""

    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    loss: str


@dataclass(frozen=True, slots=True)
class LoopFrame:
    """Loop that every batch is drawn for, with the ``model`` and the degrees of a frame.

    per_token   Megatron's calculate_per_token_loss
    sliced      documents are cut (level 1)
    multiple    of rows, as loops pad them for all ranks of a stage
    """

    model: Frame
    per_token: bool
    sliced: bool
    multiple: int = MULTIPLE

    def draw(self, seed: int, number: int) -> DrawnMicroBatches:
        random = Random(f"loop {seed} {number}")
        generator = numpy.random.default_rng([seed, number, 7])
        losses = COUNTED if self.per_token else LOSSES
        loss = losses[number % len(losses)]
        made = []
        for _ in range(self.model.replicas):
            count = random.randint(2, 6)
            lengths = [_lengths(random) for _ in range(count)]
            drawn = [_micro_batch(one, loss, generator, self) for one in lengths]
            if self.model.ranks > 1:  # in both of the forms in which ranks take their parts
                drawn[1::2] = [_in_a_row(one, self.multiple) for one in drawn[1::2]]
            made.append(tuple(drawn))
        return DrawnMicroBatches(tuple(made), loss)

    def coverage(self, drawn: DrawnMicroBatches, computed: Sequence[LoopComputed]) -> LoopCoverage:
        count = sum(map(len, drawn.micro_batches))
        replicas = {one.replica: one for one in computed}.values()
        chunks = sum(one.chunks for one in replicas)
        cut = chunks - count if replicas else 0
        return LoopCoverage(drawn.loss, count, chunks, cut, sum(one.halved for one in replicas))


def _lengths(random: Random) -> tuple[int, ...]:
    """Lengths of the samples of a micro-batch: one long one, or a few of any length."""
    if random.random() < 0.4:
        return (random.randint(CONTEXT // 2, CONTEXT - 1),)
    return tuple(random.randint(2, CONTEXT // 2) for _ in range(random.randint(1, 3)))


def _micro_batch(
    lengths: tuple[int, ...], loss: str, generator: numpy.random.Generator, frame: LoopFrame
) -> MicroBatch:
    # Sequence parallelism shares out the rows.
    samples, rows = len(lengths), -(-max(lengths) // frame.multiple) * frame.multiple
    tokens = torch.from_numpy(generator.integers(0, frame.model.vocabulary, (samples, rows + 1)))
    mask = torch.from_numpy((generator.random((samples, rows)) >= MASKED).astype(float))
    for sample, length in enumerate(lengths):
        if sample % 2:  # a prompt carries no loss
            mask[sample, : int(generator.integers(0, length))] = 0
        mask[sample, length - 1] = 1  # every sequence has a target
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
    }


def _in_a_row(batch: MicroBatch, multiple: int) -> MicroBatch:
    """The samples of a micro-batch as documents one behind the other, [1, T], each padded to
    ``multiple`` rows; "side by side" is as it was."""
    rows = [-(-length // multiple) * multiple for length in batch["lengths"]]
    row = {
        name: torch.cat([batch[name][b : b + 1, :n] for b, n in enumerate(rows)], 1)
        for name in ("tokens", "labels", "position_ids", "loss_mask")
    }
    borders = torch.tensor([0, *rows]).cumsum(0)
    return {**row, "cu_seqlens": borders, "side by side": batch, "loss": batch["loss"]}


def zigzag(rows: int, ranks: int) -> list[Tensor]:
    """Rows of a sequence that each context-parallel rank has: of 2 x ranks equal parts the first
    and the last, the second and the last but one, ..."""
    pieces = torch.arange(rows).chunk(2 * ranks)
    return [torch.cat([pieces[rank], pieces[-1 - rank]]) for rank in range(ranks)]


# ------------------------------------------------------------------ the loop's own functions


def loop_forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
    """Forward step that a loop hands to ``forward_backward_func``."""
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
    """The loss of a micro-batch from its tokens' losses, as LOSSES says; the last of what is
    returned is what the loop collects."""
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
            return total, torch.tensor(len(each_B)).int(), {"value": total.detach().item()}
        value = each_B.mean()
    return value, {"value": value.detach().item()}


def clipped(batch: MicroBatch, token_losses_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """[B]: of each sequence, the mean of its clipped ratio and divergence."""
    difference_BS = batch["old_losses"].to(token_losses_BS.dtype) - token_losses_BS
    ratio_BS = difference_BS.exp()
    advantage_B1 = batch["advantages"].to(token_losses_BS.dtype)[:, None]
    gain_BS = torch.minimum(
        ratio_BS * advantage_B1, ratio_BS.clamp(1 - CLIP, 1 + CLIP) * advantage_B1
    )
    divergence_BS = (-difference_BS).exp() + difference_BS - 1
    each_BS = (DIVERGENCE * divergence_BS - gain_BS) * mask_BS
    return each_BS.sum(1) / mask_BS.sum(1)


# ------------------------------------------------------------------ plans


def grouped_orders(
    bare: Plan, group_of: Sequence[int], random: Random, split: float
) -> tuple[tuple[Op, ...], ...]:
    """Orders of all stages, one random walk through what is ready.

    group_of   of every chunk: the micro-batch whose loss it takes part in; on the last stage no
               backward of a group comes before its last forward
    """
    last = bare.stages - 1
    mates = {g: [c for c, of in enumerate(group_of) if of == g] for g in set(group_of)}

    def forwards_done(stage: int, op: Op, finished: Sequence[set[Op]]) -> bool:
        if stage != last or op.kind not in (Kind.BACKWARD, Kind.INPUT):
            return True
        return all(Op(Kind.FORWARD, c) in finished[stage] for c in mates[group_of[op.chunk]])

    return by_stage(bare, random_walk(bare, random, split, forwards_done))


def forward_walk(chunks: int, earlier: Sequence[int], random: Random) -> tuple[Op, ...]:
    """Forwards in a random order in which slices follow those before them."""
    done: list[int] = []
    while len(done) < chunks:
        able = [
            c for c in range(chunks) if c not in done and (earlier[c] in done or earlier[c] < 0)
        ]
        done.append(random.choice(able))
    return tuple(Op(Kind.FORWARD, chunk) for chunk in done)


def arbitrary_whole_plan(
    tokens: Sequence[int], layers: Sequence[int], random: Random, split: bool, forward_only: bool
) -> Plan:
    """Micro-batches as chunks, in any order that computes the right thing."""
    count = len(tokens)
    bare = Plan(
        documents=tuple(tokens),
        layers=tuple(layers),
        chunks=tuple(Chunk((Span(number, 0, size),)) for number, size in enumerate(tokens)),
        recompute=tuple((KEEP * n,) * count for n in layers),
        orders=tuple(() for _ in layers),
    )
    if forward_only:
        orders = (forward_walk(count, [-1] * count, random),) * len(layers)
    else:
        share = random.choice((0.0, 0.5, 1.0)) if split else 0.0
        orders = grouped_orders(bare, range(count), random, share)
    return Plan(bare.documents, bare.layers, bare.chunks, bare.recompute, orders)


def arbitrary_sliced_plan(
    lengths: Sequence[Sequence[int]],
    layers: Sequence[int],
    random: Random,
    split: bool,
    forward_only: bool,
    letters: str,
) -> Plan:
    """Documents of micro-batches cut, packed, ordered and recomputed in any way; chunks of one
    micro-batch each. lengths[micro-batch] of its documents."""
    chunks: list[Chunk] = []
    group_of: list[int] = []
    first = 0
    for number, of in enumerate(lengths):
        made: list[list[Span]] = []
        whole = []
        for place, length in enumerate(of):
            pieces = random.randint(2, 4) if length >= 8 and random.random() < 0.7 else 1
            cuts = sorted(random.sample(range(1, length), pieces - 1))
            spans = [Span(first + place, *border) for border in pairwise([0, *cuts, length])]
            if pieces == 1:
                whole += spans
            else:
                made += ([span] for span in spans)
        for span in whole:
            if made and random.random() < 0.6:
                random.choice(made).append(span)
            else:
                made.append([span])
        chunks += (Chunk(tuple(spans)) for spans in made)
        group_of += [number] * len(made)
        first += len(of)
    mixed = random.sample(range(len(chunks)), len(chunks))
    chunks, group_of = [chunks[c] for c in mixed], [group_of[c] for c in mixed]
    bare = Plan(
        documents=tuple(length for of in lengths for length in of),
        layers=tuple(layers),
        chunks=tuple(chunks),
        recompute=tuple(
            tuple("".join(random.choice(letters) for _ in range(count)) for _ in chunks)
            for count in layers
        ),
        orders=tuple(() for _ in layers),
    )
    if forward_only:
        orders = (forward_walk(len(chunks), slices_of(bare).earlier, random),) * len(layers)
    else:
        share = random.choice((0.0, 0.5, 1.0)) if split else 0.0
        orders = grouped_orders(bare, group_of, random, share)
    return Plan(bare.documents, bare.layers, bare.chunks, bare.recompute, orders)
