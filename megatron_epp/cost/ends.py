"""Embedding, and LM head with its loss, on the last stage or on all stages.

Vocabulary parallelism moves the LM head from the last stage's F and B to H and G on every stage.
The LM head has three matrix products: logits, and the gradients of its input and of its weight. H
computes the first two; G repeats the first and computes the third. On each stage they do this for
1/stages of the vocabulary:

    seconds[H] = seconds[G] = 2/3 of (last_seconds[F] + last_seconds[B]) / stages

Every profile has these coefficients (``last_seconds``). F and B together contain the three
products, with or without a fused LM head. If a profile contains the seconds of H and G
(head_seconds), they are used instead. The constant seconds per chunk are not divided by the number
of stages. With multi-token prediction the LM head runs once more per MTP layer. The two passes are
those of algorithm 2 in arXiv 2411.05288; recomputing the logits is this project's choice.
"""

from collections.abc import Mapping

import numpy as np

from megatron_epp.cost.analytic import HEAD_BLOCK_TOKENS
from megatron_epp.cost.columns import CHUNKS, TOKENS
from megatron_epp.cost.communication import tensor_seconds
from megatron_epp.cost.kinds.base import element_bytes
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import OF_HEAD, Item, Kind, Payload

# Time of H, and of G, relative to the LM head's forward and backward.
HEAD_FRACTION = 2 / 3


class Ends:
    """Embedding of a ``layout``; subclasses add the LM head."""

    def __init__(self, layout: StageLayout):
        self.layout, self.profile = layout, layout.profile
        self.times = layout.predictions

    def parameters(self) -> np.ndarray:
        """Return the number of weights of embedding and LM head, before TP sharding: [stages].

        With multi-token prediction the last stage also has a copy of the embedding.
        """
        held = np.zeros(self.layout.stages)
        held[0] = self.profile.first_parameters
        if self.times > 1 and self.layout.stages > 1:
            held[-1] = self.profile.first_parameters
        return held

    def add_seconds(self, kind: Kind, per_SF: np.ndarray) -> None:
        """Add the seconds of embedding and LM head in ``kind`` to ``per_SF`` [stages, columns]."""
        per_SF[0] += self.layout.row(self.profile.first_seconds[kind])

    def head_seconds(self) -> Mapping[Kind, np.ndarray]:
        """Return the seconds of H and G: [stages, columns]."""
        return dict.fromkeys(OF_HEAD, np.zeros((self.layout.stages, self.layout.columns.width)))

    def head_comm_seconds(self) -> Mapping[Kind, np.ndarray]:
        """Return the communication seconds of H and G: [stages, columns]."""
        return dict.fromkeys(OF_HEAD, np.zeros((self.layout.stages, self.layout.columns.width)))

    def held_bytes(self, loads: Loads) -> np.ndarray:
        """Return the bytes held from F to B: [stages, chunks]."""
        held = self._head_held_bytes(loads)
        held[0] += self.layout.bytes_of(self.profile.first_bytes, loads)
        return held

    def _head_held_bytes(self, loads: Loads) -> np.ndarray:
        return np.zeros((self.layout.stages, loads.chunks))

    def freed_bytes(self, loads: Loads) -> np.ndarray:
        """Return the part of :meth:`held_bytes` that is freed when the layers' backward begins."""
        return np.zeros((self.layout.stages, loads.chunks))

    def weight_input_bytes(self, loads: Loads) -> np.ndarray:
        """Return the bytes held from I to W: [stages, chunks]."""
        return np.zeros((self.layout.stages, loads.chunks))

    def workspace_bytes(self, kind: Kind, loads: Loads) -> np.ndarray | float:
        """Return the LM head's bytes while F, B, I or W runs: [stages, chunks], or 0."""
        return 0.0

    def head_link_seconds(self, loads: Loads, forward_only: bool) -> Mapping[Payload, np.ndarray]:
        """Return the seconds that a message of H occupies each link: [stages, chunks]."""
        return {}

    def head_held_bytes(self, loads: Loads) -> Mapping[Item, np.ndarray]:
        """Return the bytes held from H to G, if there are any: [stages, chunks]."""
        return {}

    def head_workspace_bytes(self, loads: Loads) -> Mapping[Kind, np.ndarray]:
        """Return the bytes while H or G runs, if there are any: [stages, chunks]."""
        return {}

    def _on_last(self, row: np.ndarray) -> np.ndarray:
        grid = np.zeros((self.layout.stages, len(row)))
        grid[-1] = row
        return grid


class HeadOnLastStage(Ends):
    """LM head on the last stage alone, as part of its F, B, I and W."""

    def parameters(self) -> np.ndarray:
        """Return the number of weights of embedding and LM head: [stages]."""
        held = super().parameters()
        held[-1] += self.profile.last_parameters
        return held

    def add_seconds(self, kind: Kind, per_SF: np.ndarray) -> None:
        """Add the seconds of embedding and LM head in ``kind`` to ``per_SF`` [stages, columns]."""
        super().add_seconds(kind, per_SF)
        per_SF[-1] += self.times * self.layout.row(self.profile.last_seconds[kind])

    def _head_held_bytes(self, loads: Loads) -> np.ndarray:
        return self._on_last(self.times * self.layout.bytes_of(self.profile.last_bytes, loads))

    def freed_bytes(self, loads: Loads) -> np.ndarray:
        """Return the part of :meth:`held_bytes` that is freed when the layers' backward begins."""
        return self._head_held_bytes(loads)  # the LM head's backward comes first

    def weight_input_bytes(self, loads: Loads) -> np.ndarray:
        """Return the bytes held from I to W: [stages, chunks]."""
        held = self.layout.bytes_of(self.profile.last_weight_input_bytes, loads)
        return self._on_last(self.times * held)

    def workspace_bytes(self, kind: Kind, loads: Loads) -> np.ndarray:
        """Return the LM head's bytes while F, B, I or W runs: [stages, chunks]."""
        per = self.profile.last_workspace_bytes[kind]
        last = self.layout.bytes_of(per, loads)
        if self.profile.last_workspace_tokens:
            most = self.profile.last_workspace_tokens
            last *= np.minimum(1.0, most / np.maximum(loads.tokens, 1.0))
        return self._on_last(last + self.layout.fixed_bytes_of(per, loads))


class HeadOnAllStages(Ends):
    """LM head sharded over all stages: each stage has 1/stages of the vocabulary and runs H, G."""

    def parameters(self) -> np.ndarray:
        """Return the number of weights of embedding and LM head: [stages]."""
        each = self.profile.last_parameters / self.layout.stages
        return super().parameters() + np.full(self.layout.stages, each)

    def head_seconds(self) -> Mapping[Kind, np.ndarray]:
        """Return the seconds of H and G: [stages, columns]."""
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
        """Return the seconds of gathering the hidden state in a TP group, for each of H and G.

        The shape is [stages, columns]. Every rank of the group needs the full hidden state for its
        vocabulary rows.
        """
        gathered = np.zeros((self.layout.stages, self.layout.columns.width))
        one = tensor_seconds(self.layout, self.layout.hidden_bytes.per_token)
        gathered[:, TOKENS] = self.times * one
        return dict.fromkeys(OF_HEAD, gathered)

    def _head_held_bytes(self, loads: Loads) -> np.ndarray:
        """Return the bytes of the model's output on the last stage; its gradient replaces it later.

        If a profile was measured with a fused LM head, ``last_bytes`` include the final norm's
        input and the output's gradient; the larger of ``last_bytes`` and the output is used.
        """
        output = self._hidden(loads)
        if not self._holds_logits:
            early = self.times * self.layout.bytes_of(self.profile.last_bytes, loads)
            output = np.maximum(output, early)
        return self._on_last(output)

    @property
    def _holds_logits(self) -> bool:
        """Whether the profile's last stage holds logits from F to B."""
        return self.profile.last_bytes.per_token > 0 and not self.profile.last_workspace_tokens

    def _hidden(self, loads: Loads) -> np.ndarray:
        """Return the bytes of the hidden states that all runs of the LM head read: [chunks]."""
        return self.times * self.layout.bytes_of(self.layout.hidden_bytes, loads)

    def head_link_seconds(self, loads: Loads, forward_only: bool) -> Mapping[Payload, np.ndarray]:
        """Return the seconds that a message of H occupies each link: [stages, chunks].

        The last entry is the link from the last stage to the first; its messages are hidden states.
        A message on another link has three equal parts: the hidden state, and, unless plans are
        forward-only, the softmax-weighted sum of vocabulary rows and the labels' vocabulary rows.
        The last stage has the hidden state and receives only the other two parts. The two softmax
        statistics per token are not counted.
        """
        link = np.outer(self.times * self.layout.links_per_token, loads.tokens)
        link[:-2] *= 1 if forward_only else 3
        link[-2] *= 0 if forward_only else 2
        return {Payload.HEAD: link}

    def head_held_bytes(self, loads: Loads) -> Mapping[Item, np.ndarray]:
        """Return the bytes held from H to G: [stages, chunks]."""
        inputs = np.ceil(np.tile(self._hidden(loads), (self.layout.stages, 1)))
        return {Item.HEAD_INPUTS: inputs}

    def head_workspace_bytes(self, loads: Loads) -> Mapping[Kind, np.ndarray]:
        """Return the bytes while H or G runs: [stages, chunks]."""
        return {kind: self._head_workspace(kind, loads) for kind in OF_HEAD}

    def _head_workspace(self, kind: Kind, loads: Loads) -> np.ndarray:
        """Return the bytes while H or G runs, on each stage: [stages, chunks].

        H and G hold logits of a block of tokens. H also holds four vocabulary rows per token (two
        received, two to send). G also holds the gradient of the stage's shard of the weight.
        """
        profile, layout, stages = self.profile, self.layout, self.layout.stages
        if kind in profile.head_workspace_bytes:
            per = profile.head_workspace_bytes[kind]
            held = self.times * layout.bytes_of(per, loads) + layout.fixed_bytes_of(per, loads)
            held = held / stages
            return np.ceil(np.tile(held, (stages, 1)))
        at_end = profile.last_workspace_bytes[Kind.FORWARD]
        held = layout.bytes_of(at_end, loads) / stages
        if self._holds_logits:
            held = held + layout.bytes_of(profile.last_bytes, loads) / stages
        # With 1/stages of the vocabulary, blocks have ``stages`` times more tokens, up to a limit.
        most = float(HEAD_BLOCK_TOKENS[0] * layout.cp)
        if profile.last_workspace_tokens:
            most = min(most, profile.last_workspace_tokens * stages)
        held = held * np.minimum(self.times, most / np.maximum(loads.tokens, 1.0))
        held = held + layout.fixed_bytes_of(at_end, loads) / stages
        if kind is Kind.HEAD:
            held = held + 4 * self._hidden(loads)
        else:
            element = element_bytes(profile.provenance.dtype)
            held = held + element * profile.last_parameters / (stages * layout.tp)
        return np.ceil(np.tile(held, (stages, 1)))


def ends_of(layout: StageLayout) -> Ends:
    """Return embedding and LM head of ``layout``; the latter is on the last or on all stages."""
    return HeadOnAllStages(layout) if layout.vocabulary_parallel else HeadOnLastStage(layout)
