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

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

from megatron_epp.mcore import entry, setup  # noqa: E402
from megatron_epp.mcore.elastic_schedule import ElasticSchedule  # noqa: E402
from megatron_epp.mcore.model import hooks  # noqa: E402
from megatron_epp.mcore.model.stage import ModelStage  # noqa: E402
from megatron_epp.runtime import stage_peers  # noqa: E402

RANK = int(os.environ["RANK"])


def starve_evaluation(most_tokens: int) -> None:
    plain = ModelStage.forward

    def forward(self, chunk, received):
        if not self.training and self.feed.plan.chunks[chunk].tokens > most_tokens:
            raise MemoryError(f"more than {most_tokens} tokens")
        return plain(self, chunk, received)

    if RANK == 1:
        ModelStage.forward = forward


def loosen_limit() -> None:
    plain = setup.limit_bytes
    if RANK == 0:
        setup.limit_bytes = lambda config: 1e6 * plain(config)


def starve_layer() -> None:
    stage_peers.PATIENCE_SECONDS = 5.0
    running = {"iteration": 0, "done": False}
    plain_call, plain_attend = ElasticSchedule.__call__, hooks.ElasticAttention.__call__

    def call(self, **named):
        running["iteration"] += 1
        return plain_call(self, **named)

    def attend(self, *arguments, **named):
        if running["iteration"] == 2 and self.layer == 1 and not running["done"]:
            running["done"] = True
            raise MemoryError("none for the scores")
        return plain_attend(self, *arguments, **named)

    ElasticSchedule.__call__ = call
    hooks.ElasticAttention.__call__ = attend


def main() -> None:
    way = sys.argv.pop(1)
    if way == "evaluation":
        starve_evaluation(40)
    elif way == "starving":
        starve_evaluation(0)
    elif way == "limit":
        loosen_limit()
    elif way == "together" or RANK == 1:
        starve_layer()
    entry.main()


if __name__ == "__main__":
    main()
