#!/usr/bin/env python3
"""Count of Megatron-LM's functional test configurations that --epp accepts, and reasons for others.

    scripts/upstream/functional_configurations.py --megatron CHECKOUT [--installed] [--all]

The script reads every ``model_config.yaml`` of the families below that trains. It converts each
file to a command line as Megatron's own script does, and appends --epp. Each is checked as on the
ranks of one node: with 8 GPUs, or as many as it says, or more if its degrees need more; Blackwell
GPUs if its name has gb200. Then this package's flag parsing checks it: Megatron's parser and
checks, the model's configuration, and unsupported features. Nothing is trained, and no file that a
flag names is opened. Megatron's sources are those of CHECKOUT, or with --installed those of this
environment. The script prints a table by family, and a table of the first reason of each rejected
configuration; with --all, every configuration. It takes two minutes on one core. The exit status is
0, or 2 without a checkout.
"""

import argparse
import logging
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

FAMILIES = {
    "gpt": "dense", "moe": "experts", "mixtral": "mixtral", "hybrid": "hybrid",
    "nemotron": "nemotron",
}  # fmt: skip
CASES = "tests/functional_tests/test_cases"
GPUS_OF_A_NODE = 8
WORDS = 128 * 400  # of a tokenizer that is not there
# What starts such a test says, where that is no path.
LAUNCHER = {"REPEAT": "1", "TOKENIZER_TYPE": "GPTSentencePieceTokenizer"}


@dataclass(frozen=True, slots=True)
class Configuration:
    """Configuration of a functional test.

    ``values`` are its MODEL_ARGS by flag, ``variables`` its environment, ``gpus`` the GPUs of a
    node.
    """

    family: str
    name: str
    values: Mapping[str, Any]
    variables: Mapping[str, Any]
    gpus: int

    @property
    def words(self) -> list[str]:
        """Command line, as tests/functional_tests/shell_test_utils/_run_training.sh builds it."""
        found: list[str] = []
        for flag, value in self.values.items():
            text = " ".join(str(value).split())
            if value is True or text == "true":
                found.append(flag)
            elif isinstance(value, list):
                found += [flag, *" ".join(map(str, value)).split()]
            elif text.startswith("[") and text.endswith("]"):
                found += [flag, *text[1:-1].split()]
            else:
                found += [flag, text]
        return [re.sub(r"\$\{(\w+)\}", lambda name: LAUNCHER.get(name[1], ""), x) for x in found]

    @property
    def ranks(self) -> int:
        def degree(name: str, default: int = 1) -> int:
            return int(self.values.get(f"--{name}-parallel-size", default))

        tp, pp = degree("tensor-model"), degree("pipeline-model")
        experts = 1
        if "--num-experts" in self.values:
            experts = degree("expert-model") * degree("expert-tensor", tp)
        least = pp * math.lcm(tp * degree("context"), experts)
        return -(-self.gpus // least) * least


def configurations(checkout: Path) -> Iterator[Configuration]:
    """Yield the configurations that train.

    Raises:
        ValueError: if the checkout has none.
    """
    import yaml

    files = sorted((checkout / CASES).glob("*/*/model_config.yaml"))
    if not files:
        raise ValueError(f"{checkout / CASES}: no */*/model_config.yaml there")
    for path in files:
        family, name = path.parts[-3:-1]
        read = yaml.safe_load(path.read_text())
        values = read.get("MODEL_ARGS")
        if family in FAMILIES and values and read.get("MODE") != "inference":
            said = (read.get("MODEL_ENV_VARS") or {}).get("MODEL_ARGS") or {}
            gpus = int(said.get("GPUS_PER_NODE", GPUS_OF_A_NODE))
            variables = read.get("ENV_VARS") or {}
            yield Configuration(FAMILIES[family], name, values, variables, gpus)


def verdict(one: Configuration) -> str:
    """Return why --epp rejects a configuration, or ""; runs in a separate process."""
    from megatron.training import arguments

    from megatron_epp.mcore.capabilities import refusals
    from megatron_epp.mcore.flags.config import Config
    from megatron_epp.mcore.job import job_exit, read_flags
    from megatron_epp.mcore.model.layer_spec import described
    from megatron_epp.mcore.patching import cpu_host

    os.environ.update({name: str(value) for name, value in one.variables.items()})
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(one.ranks))
    sys.argv = ["pretrain", *one.words, "--epp"]
    logging.disable()
    nothing = open(os.devnull, "w")  # noqa: SIM115
    with (
        redirect_stdout(nothing),
        redirect_stderr(nothing),
        # Flags of hosts with GPUs; no tokenizer, writer or checkpoint is opened.
        patch.object(cpu_host, "is_cpu_host", lambda: False),
        patch.object(arguments, "set_global_variables", _as_with_tokenizer),
        patch.object(
            arguments, "get_device_arch_version", lambda: 10 if "gb200" in one.name else 9
        ),
        patch("megatron.training.checkpointing.load_args_from_checkpoint", lambda *a, **k: None),
    ):
        try:
            args = read_flags.read_flags()
            with read_flags.refusals_as_value_errors():
                described(args)
            Config.of(args)
            refusals.refuse(args)
        except Exception as refusal:
            said = " ".join(str(refusal).split()) or repr(refusal)
            return said if job_exit.is_users_mistake(refusal) else f"fails: {said}"
    return ""


def _as_with_tokenizer(args: argparse.Namespace) -> None:
    args.padded_vocab_size = args.padded_vocab_size or WORDS


def reason(said: str) -> str:
    """Return the feature that an error line names, without values and remedies."""
    said = said.removeprefix("--epp does not run ")
    return said.split(": ")[0] if said.startswith("unrecognized") else said.split("; ")[0][:110]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megatron", type=Path, required=True, help="a Megatron-LM checkout")
    parser.add_argument("--installed", action="store_true", help="by the installed Megatron")
    parser.add_argument("--all", action="store_true", help="print every configuration")
    parser.add_argument("-o", "--output", metavar="FILE", help="append the tables as markdown")
    given = parser.parse_args()
    try:
        every = list(configurations(given.megatron.resolve()))
    except (OSError, ValueError) as refusal:
        print(f"functional_configurations: {refusal}", file=sys.stderr)
        return 2
    if not given.installed:
        sys.path.insert(0, str(given.megatron.resolve()))
    # Megatron asks which Transformer Engine there is; its layers are not built.
    os.environ.setdefault("EPP_ENGINE", "tests.engine")
    from headline import heading, host, markdown, write

    from megatron_epp.mcore.patching import cpu_host
    from megatron_epp.show.table import text_table

    cpu_host.install_cpu_host()
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        said = pool.map(verdict, every, chunksize=1)
    if given.all:
        for one, line in zip(every, said, strict=True):
            print(f"{one.family} {one.name}: {line or 'accepted'}")
    families = list(dict.fromkeys(FAMILIES.values()))
    accepted = Counter(one.family for one, line in zip(every, said, strict=True) if not line)
    there = Counter(one.family for one in every)
    table = [[family, str(accepted[family]), str(there[family])] for family in families]
    table.append(["all", str(accepted.total()), str(there.total())])
    refused = Counter(
        (reason(line), one.family) for one, line in zip(every, said, strict=True) if line
    )
    reasons = Counter(what for what, _ in refused.elements())
    why = [
        [what, *(str(refused[what, family] or "") for family in families), str(count)]
        for what, count in reasons.most_common()
    ]
    headers = ("family", "accepted", "of"), ("refused by", *families, "all")
    print(text_table(headers[0], table), text_table(headers[1], why), sep="\n\n")
    made = f"{markdown(headers[0], table)}\n\n{markdown(headers[1], why)}\n"
    write(given.output, heading(host()) + made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
