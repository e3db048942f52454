"""``pretrain_gpt`` that writes down what every rank asks of its process groups while it trains.

watched.py FOLDER <flags>        FOLDER/traffic-RANK.json: collectives and messages; groups that
                                 had spoken before the first iteration; ranks of every group
"""

import dataclasses
import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

from megatron.training import training  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402

from megatron_epp.mcore.trainer import entry, job  # noqa: E402
from tests.certify.comm_recorder import Traffic  # noqa: E402


def main() -> None:
    folder = Path(sys.argv.pop(1))
    train, make_groups, at_start = training.train, job.make_groups, []

    def watched_groups(*arguments):
        with Traffic() as traffic:
            groups = make_groups(*arguments)
        at_start.extend({one.group for one in traffic.collectives})
        return groups

    def watched(*arguments, **named):
        with Traffic() as traffic:
            done = train(*arguments, **named)
        seen = {
            "collectives": [dataclasses.asdict(one) for one in traffic.collectives],
            "messages": [dataclasses.asdict(one) for one in traffic.messages],
            "at start": at_start,
            "sizes": {group.group_desc: group.size() for group in distributed_c10d._world.pg_map},
        }
        (folder / f"traffic-{os.environ['RANK']}.json").write_text(json.dumps(seen))
        return done

    training.train = watched
    with patch.object(job, "make_groups", watched_groups):
        entry.main()


if __name__ == "__main__":
    main()
