"""``pretrain_gpt`` that finds no memory where a test says so.

hungry.py WAY <flags>

    evaluation   rank 1 has none for an evaluation's chunks of more than 40 tokens
    starving     rank 1 has none for any chunk of an evaluation
    limit        rank 1's limit is that of --epp-memory-limit-gib, rank 0's is far away
    alone        rank 1 has none in the midst of a layer of iteration 2, once
    together     both ranks have none there
"""

import os
import sys
from copy import copy
from types import SimpleNamespace
from unittest.mock import patch

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

from megatron_epp.mcore.model.attention import attention_for  # noqa: E402
from megatron_epp.mcore.model.stage import ModelStage  # noqa: E402
from megatron_epp.mcore.trainer import entry  # noqa: E402
from megatron_epp.mcore.trainer.hooks import TrainerHooks, limit_bytes  # noqa: E402
from megatron_epp.runtime import stage_peers  # noqa: E402
from tests.waiting import LAST_RESORT_SECONDS  # noqa: E402

RANK = int(os.environ["RANK"])


class StarvedInEvaluation(ModelStage):
    most_tokens = 0

    def forward(self, chunk, received):
        if not self.training and self.builder.plan.chunks[chunk].tokens > self.most_tokens:
            raise MemoryError(f"more than {self.most_tokens} tokens")
        return super().forward(chunk, received)


class StarvedAbove40(StarvedInEvaluation):
    most_tokens = 40


class StarvedInLayer:
    """Attention that has no memory in layer 1 of iteration 2, once: a stage is made for each."""

    def __init__(self):
        self.shared = SimpleNamespace(iterations=0, done=False)

    def attention_for(self, *asked):
        self.plain = attention_for(*asked)
        self.name, self.stores_last_slice = self.plain.name, self.plain.stores_last_slice
        return self

    def of_layer(self, *asked):
        own = copy(self)
        own.plain = self.plain.of_layer(*asked)
        return own

    @property
    def all_heads(self):
        own = copy(self)
        own.plain = self.plain.all_heads
        return own

    def make_stage(self, *arguments, **others):
        self.shared.iterations += 1
        return ModelStage(*arguments, **others)

    def __call__(self, q, k, v, state, layer, drop):
        if self.shared.iterations == 2 and layer == 1 and not self.shared.done:
            self.shared.done = True
            raise MemoryError("none for the scores")
        return self.plain(q, k, v, state, layer, drop)


def hooks(way: str) -> TrainerHooks:
    if way == "evaluation" and RANK == 1:
        return TrainerHooks(make_stage=StarvedAbove40)
    if way == "starving" and RANK == 1:
        return TrainerHooks(make_stage=StarvedInEvaluation)
    if way == "limit" and RANK == 0:
        return TrainerHooks(limit_bytes=lambda config: 1e6 * limit_bytes(config))
    if way == "together" or (way == "alone" and RANK == 1):
        starved = StarvedInLayer()
        return TrainerHooks(attention_for=starved.attention_for, make_stage=starved.make_stage)
    return TrainerHooks()


if __name__ == "__main__":
    way = sys.argv.pop(1)
    # Where all fail, each waits for the others however late they come; a lone one in vain.
    patience = 5.0 if way == "alone" else LAST_RESORT_SECONDS
    with patch.object(stage_peers, "PEERS_PATIENCE_SECONDS", patience):
        entry.main(hooks=hooks(way))
