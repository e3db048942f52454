"""``pretrain_gpt`` for a job whose link is cut: impatient, and it waits for the cut.

    impatient.py SECONDS FOLDER <flags>

SECONDS stand in for --distributed-timeout-minutes, which takes whole ones: a test would stand still
for them. In the midst of its fourth iteration rank 0 writes FOLDER/here, and goes on when there is
FOLDER/cut.
"""

import os
import sys
from pathlib import Path
from unittest.mock import patch

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

from megatron_epp.mcore.model.stage import ModelStage  # noqa: E402
from megatron_epp.mcore.trainer import entry  # noqa: E402
from megatron_epp.mcore.trainer.hooks import TrainerHooks  # noqa: E402
from tests.waiting import until  # noqa: E402

ITERATION = 4


def main() -> None:
    seconds, folder = float(sys.argv.pop(1)), Path(sys.argv.pop(1))
    plain = entry.read_flags
    made = 0

    def read_flags():
        args = plain()
        args.distributed_timeout_minutes = seconds / 60
        # Both have imported what they need: nobody's groups wait for that.
        (folder / f"imported-{os.environ['RANK']}").touch()
        until(lambda: len(list(folder.glob("imported-*"))) == 2)
        return args

    class Waiting(ModelStage):
        def forward(self, chunk, received):
            if made == ITERATION and not (folder / "here").exists():
                (folder / "here").touch()
                until((folder / "cut").exists)
            return super().forward(chunk, received)

    def make_stage(*arguments):
        nonlocal made
        made += 1
        return (Waiting if os.environ["RANK"] == "0" else ModelStage)(*arguments)

    with patch.object(entry, "read_flags", read_flags):
        entry.main(hooks=TrainerHooks(make_stage=make_stage))


if __name__ == "__main__":
    main()
