"""Starts of launch scripts as far as Megatron reads and checks their flags, one after the other.

script_starts.py CASES ANSWERS    CASES: JSON, [ranks, major number of the GPUs' compute capability,
                                  CUDA_DEVICE_MAX_CONNECTIONS, entry, words] of each; ANSWERS: JSON,
                                  for each the tokens of an iteration, or why Megatron refuses
"""

import argparse
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

import torch  # noqa: E402
from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator  # noqa: E402
from megatron.training import arguments  # noqa: E402
from megatron.training.global_vars import destroy_global_vars  # noqa: E402

from megatron_epp.mcore.capabilities import refusals  # noqa: E402
from megatron_epp.mcore.flags.config import Config  # noqa: E402
from megatron_epp.mcore.job import read_flags  # noqa: E402
from megatron_epp.mcore.model.layer_spec import described  # noqa: E402
from megatron_epp.mcore.trainer import entry  # noqa: E402


def without_services(args: argparse.Namespace) -> None:
    """No tokenizer is opened: --padded-vocab-size is typed."""


def start(ranks: int, major: int, connections: str, program: str, words: list[str]) -> int | str:
    """The start of rank 0 on a host with GPUs of a generation."""
    sys.argv = ["pretrain", *words]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks))
    # With --epp, the launcher sets what Megatron expects after CUDA has read it (cuda_host.py).
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1" if "--epp" in words else connections
    with (
        patch.object(cpu_host, "is_cpu_host", lambda: False),
        patch.object(arguments, "get_device_arch_version", lambda: major),
        patch.object(torch.cuda, "get_device_capability", lambda *device: (major, 0)),
        patch.object(arguments, "set_global_variables", without_services),
    ):
        try:
            args = read_flags.read_flags()
            entry._require_kind(args.hybrid_layer_pattern, program.endswith("hybrid"))
            with read_flags.refusals_as_value_errors():
                described(args)
            if args.epp:
                Config.of(args)
                refusals.refuse(args)
            elif args.global_batch_size % (args.micro_batch_size * args.data_parallel_size):
                return "the global batch is no multiple of the replicas"
            return args.global_batch_size * args.seq_length
        except ValueError as refusal:
            return str(refusal)
        finally:
            destroy_global_vars()
            unset_num_microbatches_calculator()


if __name__ == "__main__":
    cases, answers = map(Path, sys.argv[1:])
    with redirect_stdout(sys.stderr):
        said = [start(*case) for case in json.loads(cases.read_text())]
    answers.write_text(json.dumps(said))
