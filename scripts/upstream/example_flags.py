#!/usr/bin/env python3
# ruff: noqa: E402  (run from anywhere: this checkout is put on the path first)
"""Check that a framework's checkout has all names that examples/integrations and `tune --for` use.

    git clone --depth 1 https://github.com/verl-project/verl
    scripts/upstream/example_flags.py --framework verl --checkout verl

The names are scripts, flags of the framework's parsers, keys of its configuration, and functions,
read from its sources. If the dependencies of its own parser are installed (verl: hydra-core; slime:
Megatron's training package; ms-swift: its requirements), this parser also parses all that the
examples start and that `tune` can print. The script prints missing names, and fails if there are
any.
"""

import argparse
import ast
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from framework_runs import found_in, mock

from megatron_epp.frameworks.settings import settings_of
from megatron_epp.frameworks.stock_settings import StockSettings
from megatron_epp.planner.tuning.layouts import Layout

EXAMPLES = ROOT / "examples" / "integrations"
# Every setting that there is: uneven ends, experts, recompute.
JOB = StockSettings(Layout(2, 2, 2, 2), (7, 9), 1, 4096, ep=2)


def fields_of(*files: Path) -> set[str]:
    """Return the annotated names of all classes in Python files: dataclass fields, and so flags."""
    trees = [ast.parse(file.read_text()) for file in files]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {
        line.target.id
        for one in classes
        for line in one.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def functions_in(file: Path) -> set[str]:
    tree = ast.parse(file.read_text()) if file.exists() else ast.Module([], [])
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def verl(checkout: Path) -> Iterator[str]:
    script = checkout / _named(EXAMPLES / "verl_grpo.sh", r"exec bash (\S+)")
    text = script.read_text() if script.exists() else ""
    yield from (f"{script}: has no {word}" for word in ('"$@"', "ACTOR_PP") if word not in text)
    config = checkout / "verl/trainer/config"
    keys = {
        "": _keys(config / "actor/actor.yaml"),
        "megatron.": _keys(config / "engine/megatron.yaml"),
        # What is not among the keys is added by a plus, and is a field of Megatron's.
        "megatron.override_transformer_config.": _keys(config / "engine/megatron.yaml"),
    }
    for line in settings_of("verl", JOB):
        section, name = re.fullmatch(
            r"\+?actor_rollout_ref\.actor\.((?:\w+\.)*)(\w+)=.*", line
        ).groups()  # type: ignore[union-attr]
        known = megatrons() if line.startswith("+") else keys[section]
        if name not in known:
            yield f"{line}: there is no {name}"


def slime(checkout: Path) -> Iterator[str]:
    script = checkout / _named(EXAMPLES / "slime_grpo.sh", r"exec bash (\S+)")
    if not script.exists() or "ray start" not in script.read_text():
        yield f"{script}: is not there, or starts no Ray"
    own = (checkout / "slime/utils/arguments.py").read_text()
    flags = {f"--{name.replace('_', '-')}" for name in megatrons()}
    flags |= {"--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"}
    for line in settings_of("slime", JOB):
        if line.split()[0] not in flags and f'"{line.split()[0]}"' not in own:
            yield f"{line}: there is no such flag"


def swift(checkout: Path) -> Iterator[str]:
    files = [*(checkout / "swift/megatron/arguments").glob("*.py")]
    files += (checkout / "swift/arguments").rglob("*.py")
    known = fields_of(*files)
    text = (EXAMPLES / "swift_sft.sh").read_text()
    said = [*re.findall(r"^    --(\w+)", text, re.M)]
    said += [line.split()[0][2:] for line in settings_of("ms-swift", JOB)]
    yield from (f"--{name}: there is no such flag" for name in said if name not in known)


def bridge(checkout: Path) -> Iterator[str]:
    text = (EXAMPLES / "bridge_pretrain.py").read_text()
    for module, name in re.findall(r"^from (megatron\.bridge\S*) import (\w+)", text, re.M):
        file = checkout / "src" / (module.replace(".", "/") + ".py")
        if name not in functions_in(file):
            yield f"{file}: has no function {name}"
    own = fields_of(*(checkout / "src/megatron/bridge/models").glob("*.py"))
    own |= fields_of(checkout / "src/megatron/bridge/training/config.py") | megatrons()
    said = [*re.findall(r"cfg\.model\.(\w+)", text)]
    said += re.findall(r"cfg\.\w+\.(\w+)", "\n".join(settings_of("bridge", JOB)))
    yield from (f"cfg.model.{name}: there is no such field" for name in said if name not in own)


LOOKED_UP: dict[str, Callable[[Path], Iterator[str]]] = {
    "verl": verl, "slime": slime, "ms-swift": swift, "Megatron-Bridge": bridge,
}  # fmt: skip


# ------------------------------------------------------------------ by their own parsers


def verl_parses(checkout: Path) -> Iterator[str]:
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    words = started(
        "verl_grpo.sh", "uv", *settings_of("verl", JOB), VERL=str(checkout), ACTOR_PP="4"
    )
    overrides = words[words.index("verl.trainer.main_ppo") + 1 :]
    with initialize_config_dir(str(checkout / "verl/trainer/config"), version_base=None):
        try:
            compose("ppo_trainer", overrides=overrides)
        except HydraException as refusal:
            yield str(refusal)


def slime_parses(checkout: Path) -> Iterator[str]:
    sys.path.insert(0, str(checkout))
    import megatron_epp

    megatron_epp.prepare_host()
    mock("wandb", "httpx", "sglang", "sglang_router")
    from megatron.training.arguments import add_megatron_arguments
    from slime.utils.arguments import get_slime_extra_args_provider

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser = get_slime_extra_args_provider()(add_megatron_arguments(parser))
    # Its script kills processes when it starts, so it is not started.
    said = shlex.split(" ".join(settings_of("slime", JOB)))
    yield from unknown_to(parser, [*said, "--rollout-batch-size", "8"])


def swift_parses(checkout: Path) -> Iterator[str]:
    sys.path.insert(0, str(checkout))
    import megatron_epp

    megatron_epp.prepare_host()
    mock("mcore_bridge")
    from swift.megatron.arguments import MegatronSftArguments
    from swift.utils.utils import _patch_get_type_hints
    from transformers import HfArgumentParser

    with _patch_get_type_hints():
        parser = HfArgumentParser([MegatronSftArguments])
    said = shlex.split(" ".join(settings_of("ms-swift", JOB)))
    yield from unknown_to(parser, started("swift_sft.sh", "megatron", *said)[1:])  # behind sft


PARSED: dict[str, Callable[[Path], Iterator[str]]] = {
    "verl": verl_parses, "slime": slime_parses, "ms-swift": swift_parses,
}  # fmt: skip


def unknown_to(parser: argparse.ArgumentParser, words: list[str]) -> Iterator[str]:
    parser.exit_on_error = False
    try:
        yield from (f"{word}: its parser knows none" for word in parser.parse_known_args(words)[1])
    except argparse.ArgumentError as refusal:
        yield str(refusal)


def started(example: str, program: str, *words: str, **variables: str) -> list[str]:
    """Return the arguments with which an example starts ``program``.

    A substitute for the program prints its arguments.
    """
    with tempfile.TemporaryDirectory() as folder:
        stand_in = Path(folder, program)
        stand_in.write_text('#!/bin/sh\nprintf "%s\\0" "$MEGATRON_EPP" "$@"\n')
        stand_in.chmod(0o755)
        path = f"{folder}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", EXAMPLES / example, *words],
            env=os.environ | variables | {"PATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
    asked, *found = done.stdout.split("\0")[:-1]
    assert asked == "1", f"{example}: MEGATRON_EPP is {asked!r} where {program} starts"
    return found


def looked_up_and_parsed(name: str, checkout: Path) -> Iterator[str]:
    yield from LOOKED_UP[name](checkout)
    if name not in PARSED:
        return
    try:
        wrong = [*PARSED[name](checkout)]
    except ImportError as lacking:
        print(f"{name}: looked up alone, its own parser cannot be imported: {lacking}")
        return
    print(f"{name}: its own parser refuses {len(wrong)} of what the examples name")
    yield from wrong


def megatrons() -> set[str]:
    """Return the fields of the installed Megatron's configuration, without importing it."""
    (place,) = {
        Path(path, "megatron", "core") for path in sys.path
        if Path(path, "megatron", "core", "transformer").is_dir()
    }  # fmt: skip
    return fields_of(
        place / "transformer/transformer_config.py", place / "model_parallel_config.py"
    )


def _keys(file: Path) -> set[str]:
    return set(re.findall(r"^\s*(\w+):", file.read_text(), re.M))


def _named(file: Path, pattern: str) -> str:
    found = re.search(pattern, file.read_text())
    assert found is not None, f"{file} names no script"
    return found[1]


def main() -> int:
    known = {name: partial(looked_up_and_parsed, name) for name in LOOKED_UP}
    framework, missing = found_in(__doc__, known)
    for line in missing:
        print(line)
    print(f"{framework}: {len(missing)} of what the examples name is not there")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
