"""Several jobs one after the other in the processes of one torchrun, which take seconds to start.

    several.py LINES [--adapters RANK]

LINES: a JSON list of command lines, each a list of words for pretrain_gpt. With --adapters the
model is frozen and low-rank adapters are put around its linears before --epp's hooks see it.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

import torch.distributed as dist  # noqa: E402
from megatron.core.num_microbatches_calculator import (  # noqa: E402
    unset_num_microbatches_calculator,
)
from megatron.core.rerun_state_machine import destroy_rerun_state_machine  # noqa: E402
from megatron.training.global_vars import destroy_global_vars  # noqa: E402

from megatron_epp.mcore.certify.adapters import adapt  # noqa: E402
from megatron_epp.mcore.job import job_exit  # noqa: E402
from megatron_epp.mcore.trainer import entry  # noqa: E402
from megatron_epp.mcore.trainer.hooks import TrainerHooks  # noqa: E402


def forget() -> None:
    """Make Megatron ready for another job: what a new process would begin with."""
    port: list[int | None] = [None]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        if dist.get_rank() == 0:
            port = [probe.getsockname()[1]]
    dist.broadcast_object_list(port, src=0)
    job_exit.finish()
    destroy_global_vars()
    destroy_rerun_state_machine()
    unset_num_microbatches_calculator()
    # --attention-backend, which must not find another's choice.
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]
    # Not torchrun's store: it still holds what the ranks of this job said there.
    os.environ.update(MASTER_PORT=str(port[0]), TORCHELASTIC_USE_AGENT_STORE="False")


def hooks_of(words: list[str]) -> TrainerHooks:
    if not words:
        return TrainerHooks()
    rank = int(words[1])
    return TrainerHooks(pre_wrap=lambda models: [adapt(one, rank) for one in models])


if __name__ == "__main__":
    name, *others = sys.argv[1:]
    for number, words in enumerate(json.loads(Path(name).read_text())):
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:  # which logs losses
            print(f"line {number}", flush=True)
        sys.argv = ["pretrain_gpt", *words]
        entry.train(time.time(), hooks_of(others))
        forget()
