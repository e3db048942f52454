"""Starts of the trainer as far as its flags are read and refused, one after the other.

flag_starts.py CASES ANSWERS    CASES: JSON, [ranks, hybrid, words] of each start, hybrid: whether
                                pretrain_hybrid starts; ANSWERS: JSON, for each ["refused", the
                                line] or ["starts", the warning or null]
"""

import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator  # noqa: E402
from megatron.training.global_vars import destroy_global_vars  # noqa: E402

from megatron_epp.mcore.capabilities import refusals  # noqa: E402
from megatron_epp.mcore.flags import replaced  # noqa: E402
from megatron_epp.mcore.flags.config import Config  # noqa: E402
from megatron_epp.mcore.job import read_flags  # noqa: E402
from megatron_epp.mcore.trainer import entry  # noqa: E402


def start(ranks: int, hybrid: bool, words: list[str]) -> tuple[str, str | None]:
    """What becomes of flags on a host with GPUs."""
    sys.argv = ["pretrain", *words]
    os.environ.update(RANK="0", WORLD_SIZE=str(ranks))
    try:
        args = read_flags.read_flags()
        entry._require_kind(args.hybrid_layer_pattern, hybrid)
        Config.of(args)
        refusals.refuse(args)
        return "starts", replaced.warning(args)
    except ValueError as refusal:
        return "refused", str(refusal)
    finally:
        destroy_global_vars()
        unset_num_microbatches_calculator()


if __name__ == "__main__":
    cases, answers = map(Path, sys.argv[1:])
    with patch.object(cpu_host, "is_cpu_host", lambda: False):
        answers.write_text(json.dumps([start(*case) for case in json.loads(cases.read_text())]))
