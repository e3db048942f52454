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
from itertools import accumulate
from random import Random
from typing import Any

import numpy
import torch
from torch import Tensor

from megatron_epp.certify.batches import CONTEXT, MASKED
from megatron_epp.ir import Chunk, Kind, Op, Plan, Span, slices_of
from megatron_epp.ir.random_plan import arbitrary_chunks, by_stage, random_walk
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


def arbitrary_sliced_plan(
    lengths: Sequence[Sequence[int]],
    layers: Sequence[int],
    random: Random,
    split: bool,
    forward_only: bool,
    modes: str,
    parents: Sequence[Sequence[int]] = (),
    cut: bool = True,
) -> Plan:
    """Return a plan with documents sliced, packed, ordered and recomputed at random.

    Every chunk belongs to one micro-batch.

    Args:
        lengths: per micro-batch, the number of tokens of each of its documents.
        layers: number of layers of every stage.
        random: random generator.
        split: whether backwards may be split into I and W.
        forward_only: whether the call has no backwards.
        modes: recompute modes to draw from.
        parents: per micro-batch, the document that each document continues, or -1; () if no
            document continues another.
        cut: whether documents are sliced; otherwise every micro-batch is one chunk.
    """
    firsts = list(accumulate(map(len, lengths), initial=0))
    numbered, prefixes = [], []
    for number, of in enumerate(lengths):
        within = [
            None if parent < 0 else Span(parent, 0, of[parent])
            for parent in (parents[number] if parents else (-1,) * len(of))
        ]
        if not cut:
            spans = (Span(firsts[number] + n, 0, length) for n, length in enumerate(of))
            chunks: Sequence[Chunk] = (Chunk(tuple(spans)),)
        elif any(within):
            chunks = tree_chunks(of, tuple(within), random, firsts[number])
        else:
            chunks = arbitrary_chunks(of, random, firsts[number])
        numbered += [(chunk, number) for chunk in chunks]
        prefixes += [p and replace(p, document=firsts[number] + p.document) for p in within]
    random.shuffle(numbered)
    documents = [length for of in lengths for length in of]
    bare = _bare(documents, layers, [chunk for chunk, _ in numbered], random, modes)
    bare = replace(bare, prefixes=tuple(prefixes))
    return _ordered(bare, [number for _, number in numbered], random, split, forward_only)


def _bare(
    documents: Sequence[int],
    layers: Sequence[int],
    chunks: Sequence[Chunk],
    random: Random,
    modes: str,
) -> Plan:
    """Return a plan with random recompute modes and without ops."""
    recompute = tuple(
        tuple("".join(random.choices(modes, k=count)) for _ in chunks) for count in layers
    )
    orders: tuple[tuple[Op, ...], ...] = tuple(() for _ in layers)
    return Plan(tuple(documents), tuple(layers), tuple(chunks), recompute, orders)


def _ordered(
    bare: Plan,
    group_of: Sequence[int],
    random: Random,
    split: bool,
    forward_only: bool,
) -> Plan:
    """Return ``bare`` with the ops of all stages in a random order that respects dependencies.

    ``group_of[c]`` is the micro-batch that contains chunk c. On the last stage, all forwards of a
    micro-batch precede its backwards, because its loss needs the outputs of all its chunks.
    """
    if forward_only:
        return replace(bare, orders=(_forward_walk(bare, random),) * bare.stages)
    fraction = random.choice((0.0, 0.5, 1.0)) if split else 0.0
    mates = {g: [c for c, of in enumerate(group_of) if of == g] for g in set(group_of)}

    def forwards_done(stage: int, op: Op, finished: Sequence[set[Op]]) -> bool:
        if stage < bare.stages - 1 or op.kind not in (Kind.BACKWARD, Kind.INPUT):
            return True
        return all(Op(Kind.FORWARD, c) in finished[stage] for c in mates[group_of[op.chunk]])

    walked = list(random_walk(bare, random, fraction, forwards_done))
    return replace(bare, orders=by_stage(bare, walked))


def _forward_walk(plan: Plan, random: Random) -> tuple[Op, ...]:
    """Return all forwards in a random order, each slice after its document's earlier slices."""
    earlier, done = slices_of(plan).earlier, [-1]
    while len(done) <= len(plan.chunks):
        able = [c for c, before in enumerate(earlier) if c not in done and before in done]
        done.append(random.choice(able))
    return tuple(Op(Kind.FORWARD, chunk) for chunk in done[1:])
