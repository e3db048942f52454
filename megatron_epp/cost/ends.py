"""Ends of the model: the embedding, and the LM head with its loss, on the last stage or on all.

Vocabulary parallelism takes the LM head from the last stage's F and B and gives every stage a
part of it, H and G. Of the three products that it takes without (logits, the gradients of the input
and of the weight) H does the first two, G the first again and the third, all for 1/stages of the
vocabulary:

    seconds[H] = seconds[G] = 2/3 of (last_seconds[F] + last_seconds[B]) / stages

so a profile's coefficients serve, measured or analytic, with the early head or without, whose F + B
are the three products in either case; where it has H and G themselves (head_seconds), these. What a
chunk costs whatever its size is not divided. With multi-token prediction it runs as many
times more of every row. Sources: arXiv 2411.05288 (algorithm 2, whose two
passes these are); that the logits are made twice is ours.
"""

from collections.abc import Mapping

import numpy as np

from megatron_epp.cost.analytic import ELEMENT_BYTES, HEAD_BLOCK_TOKENS
from megatron_epp.cost.columns import CHUNKS, TOKENS
from megatron_epp.cost.communication import tensor_seconds
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import OF_HEAD, Item, Kind, Payload

# Fraction of the LM head's forward and backward that each of H and G takes.
HEAD_FRACTION = 2 / 3


class Ends:
    """The ends of a ``layout`` without an LM head; the classes of its places add it."""

    def __init__(self, layout: StageLayout):
        self.layout, self.profile = layout, layout.profile
        self.times = layout.predictions

    def parameters(self) -> np.ndarray:
        """[stages] weights, before they are sharded over tensor-parallel ranks. With multi-token
        prediction the last stage has an embedding of its own."""
        held = np.zeros(self.layout.stages)
        held[0] = self.profile.first_parameters
        if self.times > 1 and self.layout.stages > 1:
            held[-1] = self.profile.first_parameters
        return held

    def add_seconds(self, kind: Kind, per_SF: np.ndarray) -> None:
        """Add what the ends take inside an op of the layers to [stages, columns]."""
        per_SF[0] += self.layout.row(self.profile.first_seconds[kind])

    def head_seconds(self) -> Mapping[Kind, np.ndarray]:
        """[stages, columns] of H and G: none."""
        return dict.fromkeys(OF_HEAD, np.zeros((self.layout.stages, self.layout.width)))

    def head_comm_seconds(self) -> Mapping[Kind, np.ndarray]:
        """[stages, columns] of communication besides."""
        return dict.fromkeys(OF_HEAD, np.zeros((self.layout.stages, self.layout.width)))

    def held_bytes(self, loads: Loads) -> np.ndarray:
        """[stages, chunks] from F to B."""
        held = self._head_held_bytes(loads)
        held[0] += self.layout.bytes_of(self.profile.first_bytes, loads)
        return held

    def _head_held_bytes(self, loads: Loads) -> np.ndarray:
        return np.zeros((self.layout.stages, loads.chunks))

    def freed_bytes(self, loads: Loads) -> np.ndarray:
        """[stages, chunks] of :meth:`held_bytes` that are gone when the layers' backward begins."""
        return np.zeros((self.layout.stages, loads.chunks))

    def weight_input_bytes(self, loads: Loads) -> np.ndarray:
        """[stages, chunks] from I to W."""
        return np.zeros((self.layout.stages, loads.chunks))

    def workspace_bytes(self, kind: Kind, loads: Loads) -> np.ndarray | float:
        """[stages, chunks] while an op of the layers runs."""
        return 0.0

    def head_link_seconds(self, loads: Loads, forward_only: bool) -> Mapping[Payload, np.ndarray]:
        """[stages, chunks] that a message of H occupies each link, where there are."""
        return {}

    def head_held_bytes(self, loads: Loads) -> Mapping[Item, np.ndarray]:
        """[stages, chunks] from H to G, where there are."""
        return {}

    def head_workspace_bytes(self, loads: Loads) -> Mapping[Kind, np.ndarray]:
        """[stages, chunks] while H or G runs, where there are."""
        return {}

    def _on_last(self, row: np.ndarray) -> np.ndarray:
        grid = np.zeros((self.layout.stages, len(row)))
        grid[-1] = row
        return grid


class HeadOnLastStage(Ends):
    """The LM head is part of the last stage's F, B, I and W."""

    def parameters(self) -> np.ndarray:
        held = super().parameters()
        held[-1] += self.profile.last_parameters
        return held

    def add_seconds(self, kind: Kind, per_SF: np.ndarray) -> None:
        super().add_seconds(kind, per_SF)
        per_SF[-1] += self.times * self.layout.row(self.profile.last_seconds[kind])

    def _head_held_bytes(self, loads: Loads) -> np.ndarray:
        return self._on_last(self.times * self.layout.bytes_of(self.profile.last_bytes, loads))

    def freed_bytes(self, loads: Loads) -> np.ndarray:
        return self._head_held_bytes(loads)  # its backward comes first

    def weight_input_bytes(self, loads: Loads) -> np.ndarray:
        held = self.layout.bytes_of(self.profile.last_weight_input_bytes, loads)
        return self._on_last(self.times * held)

    def workspace_bytes(self, kind: Kind, loads: Loads) -> np.ndarray:
        per = self.profile.last_workspace_bytes[kind]
        last = self.layout.bytes_of(per, loads)
        if self.profile.last_workspace_tokens:
            most = self.profile.last_workspace_tokens
            last *= np.minimum(1.0, most / np.maximum(loads.tokens, 1.0))
        return self._on_last(last + self.layout.fixed_bytes_of(per, loads))


class HeadOnAllStages(Ends):
    """Every stage has 1/stages of the vocabulary, and runs H and G of every chunk."""

    def parameters(self) -> np.ndarray:
        each = self.profile.last_parameters / self.layout.stages
        return super().parameters() + np.full(self.layout.stages, each)

    def head_seconds(self) -> Mapping[Kind, np.ndarray]:
        return {kind: self._head_seconds(kind) for kind in OF_HEAD}

    def _head_seconds(self, kind: Kind) -> np.ndarray:
        row, profile = self.layout.row, self.profile
        if kind in profile.head_seconds:
            each = row(profile.head_seconds[kind])
        else:
            unsharded = [row(profile.last_seconds[op]) for op in (Kind.FORWARD, Kind.BACKWARD)]
            each = HEAD_FRACTION * (unsharded[0] + unsharded[1])
        each = self.times * each
        launched = each[CHUNKS]
        each = each / self.layout.stages
        each[CHUNKS] = launched
        return np.tile(each, (self.layout.stages, 1))

    def head_comm_seconds(self) -> Mapping[Kind, np.ndarray]:
        """Gathers of the hidden state inside a TP group, whose ranks have other vocabulary rows
        each: H and G do so once each."""
        gathered = np.zeros((self.layout.stages, self.layout.width))
        one = tensor_seconds(self.layout, self.layout.hidden_bytes.per_token)
        gathered[:, TOKENS] = self.times * one
        return dict.fromkeys(OF_HEAD, gathered)

    def _head_held_bytes(self, loads: Loads) -> np.ndarray:
        """The model's output, then its gradient; where it was measured with an early head, what
        that holds are the final norm's input and that gradient, as here."""
        output = self._hidden(loads)
        if not self._holds_logits:
            early = self.times * self.layout.bytes_of(self.profile.last_bytes, loads)
            output = np.maximum(output, early)
        return self._on_last(output)

    @property
    def _holds_logits(self) -> bool:
        """Whether logits are what the profile's last stage holds from F to B."""
        return self.profile.last_bytes.per_token > 0 and not self.profile.last_workspace_tokens

    def _hidden(self, loads: Loads) -> np.ndarray:
        """[chunks] hidden states of which tokens are predicted."""
        return self.times * self.layout.bytes_of(self.layout.hidden_bytes, loads)

    def head_link_seconds(self, loads: Loads, forward_only: bool) -> Mapping[Payload, np.ndarray]:
        """The link from the last stage to the first is in the last row. Between stages a message
        carries the hidden state, and as large the weighted rows and the labels' rows; to the last
        stage, which has the hidden state, the rows alone. Without a backward nobody wants rows. Two
        statistics a token are not counted."""
        link = np.outer(self.times * self.layout.links_per_token, loads.tokens)
        link[:-2] *= 1 if forward_only else 3
        link[-2] *= 0 if forward_only else 2
        return {Payload.HEAD: link}

    def head_held_bytes(self, loads: Loads) -> Mapping[Item, np.ndarray]:
        inputs = np.ceil(np.tile(self._hidden(loads), (self.layout.stages, 1)))
        return {Item.HEAD_INPUTS: inputs}

    def head_workspace_bytes(self, loads: Loads) -> Mapping[Kind, np.ndarray]:
        return {kind: self._head_workspace(kind, loads) for kind in OF_HEAD}

    def _head_workspace(self, kind: Kind, loads: Loads) -> np.ndarray:
        """Logits of a stage's part of the vocabulary, for a block of tokens at a time; H has rows
        besides, two a token as they come and as they go, G the gradient of its part of the weight.
        """
        profile, layout, stages = self.profile, self.layout, self.layout.stages
        if kind in profile.head_workspace_bytes:
            per = profile.head_workspace_bytes[kind]
            held = self.times * layout.bytes_of(per, loads) + layout.fixed_bytes_of(per, loads)
            held = held / stages
            return np.ceil(np.tile(held, (stages, 1)))
        at_end = profile.last_workspace_bytes[Kind.FORWARD]
        held = layout.bytes_of(profile.last_bytes if self._holds_logits else at_end, loads)
        held = held / stages
        # A part of the vocabulary has blocks of as many tokens more, up to the largest.
        most = float(HEAD_BLOCK_TOKENS[0] * layout.cp)
        if profile.last_workspace_tokens:
            most = min(most, profile.last_workspace_tokens * stages)
        held = held * np.minimum(self.times, most / np.maximum(loads.tokens, 1.0))
        held = held + layout.fixed_bytes_of(at_end, loads) / stages
        if kind is Kind.HEAD:
            held = held + 4 * self._hidden(loads)
        else:
            held = held + ELEMENT_BYTES * profile.last_parameters / (stages * layout.tp)
        return np.ceil(np.tile(held, (stages, 1)))


def ends_of(layout: StageLayout) -> Ends:
    return HeadOnAllStages(layout) if layout.vocabulary_parallel else HeadOnLastStage(layout)
