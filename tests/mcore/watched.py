"""``pretrain_gpt`` that writes down what every rank asks of its process groups while it trains.

watched.py FOLDER <flags>        FOLDER/traffic-RANK.json: collectives and messages
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

from megatron.training import training  # noqa: E402

from megatron_epp.mcore import entry  # noqa: E402
from megatron_epp.runtime.comm_recorder import Traffic  # noqa: E402


def main() -> None:
    folder = Path(sys.argv.pop(1))
    train = training.train

    def watched(*arguments, **named):
        with Traffic() as traffic:
            done = train(*arguments, **named)
        seen = {
            "collectives": [dataclasses.asdict(one) for one in traffic.collectives],
            "messages": [dataclasses.asdict(one) for one in traffic.messages],
        }
        (folder / f"traffic-{os.environ['RANK']}.json").write_text(json.dumps(seen))
        return done

    training.train = watched
    entry.main()


if __name__ == "__main__":
    main()
