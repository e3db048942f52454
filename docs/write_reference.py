#!/usr/bin/env python3
"""Writes the generated pages of docs/reference from the code that they describe.

    python docs/write_reference.py

flags.md from the dataclasses that define the flags, commands.md from the parsers of the commands,
refused_flags.md from the capabilities table, support.md from support.toml, whose rows the
capabilities table answers. A test writes the pages again and compares.
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_epp.certify.trial import certify_parser
from megatron_epp.cli.flags import FLAGS, add_command_flags
from megatron_epp.cli.options import COMMANDS
from megatron_epp.flag_fields import add_flags
from megatron_epp.planner.options import LEVERS, default_levers

FOLDER = Path(__file__).parent / "reference"
NOTE = "<!-- written by docs/write_reference.py; do not edit -->"
# Groups of the training flags, in the order of the page; a flag without a group is an error.
GROUPS = {
    "Planner": "epp epp_planner epp_levers epp_effort epp_plan_ahead epp_plan_cores",
    "Memory": "epp_memory_budget_gib epp_host_memory_gib epp_memory_limit_gib",
    "Stages": "epp_placement epp_vocab_parallel epp_layouts",
    "Cost model": "epp_cost_model",
    "Documents": "epp_overlong epp_blend epp_share_from",
    "Kernels": "epp_attention epp_row_multiple",
    "Plans on disk": "epp_plan epp_record",
}
COLUMNS = {"training": "`--epp`", "slices": "external loops", "no_gpu": "CPU-only host"}


# ------------------------------------------------------------------ Markdown


def as_code(text: str) -> str:
    """``text`` with flags, and names with an underscore, as code; what is code already stays."""
    words = r"(?<![\w./-])(-[\w.-]*[a-z\d]|[a-z]\w*_[\w.]*\w)(?![\w/])"
    pieces = text.split("`")
    pieces[::2] = [re.sub(words, r"`\1`", piece) for piece in pieces[::2]]
    return "`".join(pieces)


def cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ").replace("<", "&lt;")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(each)} |\n" for each in lines)


def code(word: str) -> str:
    return f"`{word}`" if word else ""


# ------------------------------------------------------------------ flags and commands


def value_of(action: argparse.Action) -> str:
    """What may follow the flag on the command line: nothing after a switch."""
    if action.nargs == 0 or not action.option_strings:
        return ""
    if action.choices is not None:
        return f" {'|'.join(map(str, action.choices))}"
    return f" {action.metavar or action.dest.upper()}{' ...' if action.nargs == '+' else ''}"


def default_of(action: argparse.Action) -> str:
    default = action.default
    if default is None or default is argparse.SUPPRESS:
        return ""
    return code({True: "on", False: "off"}[default] if isinstance(default, bool) else str(default))


def flag_rows(actions: Iterable[argparse.Action]) -> Iterator[list[str]]:
    """Flag with what may follow it, and meaning, of every action."""
    for action in actions:
        if "--help" in action.option_strings or action.help is argparse.SUPPRESS:
            continue
        names = [name for name in action.option_strings if not name.startswith("--no-")]
        anchor = f'<a id="{names[-1].lstrip("-")}"></a>' if names else ""
        shown = code(", ".join(names or [str(action.metavar)]) + value_of(action))
        help_text = (action.help or "") % {**vars(action), "prog": "megatron_epp"}
        help_text = re.sub(r"(?<!\w)'([^']*\*[^']*)'", r"`\1`", help_text)  # no emphasis
        meaning = as_code(help_text.replace("<", "&lt;"))
        if (default := default_of(action)) not in (
            "",
            "`off`",
        ) and "default" not in meaning.lower():
            meaning = f"{meaning.removesuffix('.')}. Default: {default}."
        yield [anchor + shown, meaning]


def bullets(rows: Iterable[Iterable[str]]) -> str:
    return "".join(f"- {': '.join(each)}\n" for each in rows)


@cache
def training_parser() -> argparse.ArgumentParser:
    from megatron_epp.mcore.flags.config import Config

    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser, Config)
    return parser


def flags_page() -> str:
    actions = {action.dest: action for action in training_parser()._actions}
    grouped = [name for names in GROUPS.values() for name in names.split()]
    if odd := sorted(set(actions) - set(grouped)):
        raise ValueError(f"GROUPS lacks {odd}: expected every flag of Config in one group")
    parts = [
        f"# Training flags\n\n{NOTE}\n",
        "megatron_epp adds these flags to Megatron-LM's `pretrain_gpt.py` and "
        "`pretrain_hybrid.py`; `--help` prints the same texts. See also the "
        "[flags of the commands](commands.md), "
        "[Megatron's flags that are refused or ignored](refused_flags.md), and the "
        "[simulated gain of each default](../../scripts/bench/results/2026-11-27-plan-defaults.md)."
        "\n",
    ]
    for title, names in GROUPS.items():
        rows = bullets(flag_rows(actions[name] for name in names.split() if name in actions))
        parts.append(f"## {title}\n\n{rows}")
    on = {True: "on", False: "off"}
    cpu, gpu = default_levers("cpu"), default_levers("h100", host_memory=True)
    parts.append(
        "## Levers\n\n"
        "[`--epp-levers`](#epp-levers) and `--levers` select these optimizations of planner `epp`, "
        "which [planner](../how/planner.md#levers) explains.\n\n"
        + table(
            ("lever", "default on CPUs", "default on GPUs", "meaning"),
            [
                [code(name), on[name in cpu], on[name in gpu], cell(text)]
                for name, text in LEVERS.items()
            ],
        )
    )
    return "\n".join(parts)


def command_parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for name in COMMANDS:
        parser = argparse.ArgumentParser(add_help=False)
        if name == "certify":
            parser = certify_parser()
        elif name == "profile":
            from megatron_epp.mcore.trainer.profile_command import ProfileFlags

            add_flags(parser, ProfileFlags)
        else:
            add_command_flags(parser, FLAGS[name])
        yield name, parser


def option_row(action: argparse.Action) -> tuple[str, str]:
    """Return flag and meaning of an option, without an anchor: several commands have it."""
    [[flag, meaning]] = flag_rows([action])
    return re.sub(r"<a .*></a>", "", flag), meaning


def as_there(meaning: str, other: str, link: str, least: int) -> str:
    """Return ``meaning`` with a link for the sentences with which ``other`` begins, too."""
    pairs = enumerate(zip(f"{meaning}\n", f"{other}\0", strict=False))
    common = next(i for i, (ours, theirs) in pairs if ours != theirs)
    end = len(meaning) - 1 if common == len(meaning) else meaning.rfind(". ", 0, common + 1)
    return meaning if meaning == other or end < least else f"As {link}{meaning[end:]}"


def as_shared(meaning: str, shared: str) -> str:
    return as_there(meaning, shared, "[shared](#shared-options)", 60)


@cache
def training_meanings() -> dict[str, str]:
    """Meaning of every training flag, by its name without ``epp-``."""
    rows = [option_row(action) for action in training_parser()._actions]
    return {re.sub(r"`--epp-([\w-]*).*", r"\1", flag): meaning for flag, meaning in rows}


def as_trained(flag: str, meaning: str) -> str:
    name = re.sub(r"`--([\w-]+).*", r"\1", flag)
    link = f"[`--epp-{name}`](flags.md#epp-{name}) in training"
    return as_there(meaning, training_meanings().get(name, ""), link, 150)


def named(commands: list[str]) -> str:
    """Commands that share an option, of those that plan or read plans."""
    others = [name for name in FLAGS if name not in commands]
    if len(others) > 1:
        return ", ".join(commands)
    return "all" if not others else f"all but {others[0]}"


def commands_page() -> str:
    megatrons = (
        "All other flags are Megatron's flags for the model, such as `--num-layers` and "
        "`--hidden-size`.\n"
    )
    # By title of its group: every option, with the commands that have it in the same words.
    groups: dict[str, dict[tuple[str, str], list[str]]] = {}
    notes: dict[str, list[str]] = {name: [] for name in COMMANDS}
    for name, parser in command_parsers():
        for i, group in enumerate(parser._action_groups):
            notes[name] += [as_code(group.description)] if group.description else []
            title = str(group.title) if i > 1 else "plan files and output"
            for action in group._group_actions:
                if "--help" not in action.option_strings:
                    row = groups.setdefault(title, {}).setdefault(option_row(action), [])
                    row.append(name)
    parts = [
        f"# Commands\n\n{NOTE}\n",
        "Run `python -m megatron_epp COMMAND`, or `megatron-epp COMMAND` if the package is "
        "installed. `COMMAND --help` prints the same texts. Options that several commands have are "
        "under [shared options](#shared-options). [Training flags](flags.md) describes the flags "
        "of training and the [levers](flags.md#levers).\n",
    ]
    shared = {
        title: {row: each for row, each in rows.items() if len(each) > 1}
        for title, rows in groups.items()
    }
    first: dict[str, str] = {}
    for flag, meaning in (row for rows in shared.values() for row in rows):
        first.setdefault(flag, meaning)
    for name in COMMANDS:
        parts.append(f"## {name}\n\n{COMMANDS[name][0].upper()}{COMMANDS[name][1:]}.\n")
        parts += [f"{note}\n" for note in notes[name]]
        if name in ("certify", "profile"):
            parts.append(megatrons)
        own = [
            (flag, as_trained(flag, as_shared(meaning, first.get(flag, ""))))
            for rows in groups.values()
            for (flag, meaning), each in rows.items()
            if each == [name]
        ]
        parts.append(bullets(own) or "Options: see [shared options](#shared-options).\n")
    parts.append("## Shared options\n")
    parts.append(f"*All* means {', '.join(FLAGS)}.\n")
    for title, rows in shared.items():
        if rows:
            parts.append(f"### {title[0].upper()}{title[1:]}\n")
        for commands in dict.fromkeys(map(tuple, rows.values())):
            lines = [
                (flag, as_trained(flag, as_shared(meaning, first[flag])))
                for (flag, meaning), each in rows.items()
                if tuple(each) == commands
            ]
            parts.append(f"*{named([*commands])}*:\n\n{bullets(lines)}")
    return "\n".join(parts)


# ------------------------------------------------------------------ what is refused


def flags_and_feature(what: str) -> tuple[list[str], str]:
    """Flags of a row of the table of refusals, and its text without those that stand alone."""
    flags = re.findall(r"--[a-z][a-z0-9-]*", what)
    feature = re.sub(r" \((?:(?:, )?-{1,2}[a-z][a-z0-9-]*)+\)", "", what)
    feature = re.sub(r"\(--[a-z][a-z0-9-]*,? (?![^()]*--)", "(", feature)
    return flags, "" if [feature] == flags else feature


def refused_page() -> str:
    from megatron_epp.mcore.capabilities.table import TABLE
    from megatron_epp.mcore.flags.replaced import REPLACED
    from megatron_epp.mcore.kinds.registry import replaced_by_kinds

    reset = {name for row in (*REPLACED, *replaced_by_kinds()) for name in row.names.split()}
    rows = []
    for row in TABLE:
        where = {
            "training": "`--epp`" if row.typed else r"`--epp`\*",
            "slices": "calls" if row.of_call else "loops",
            "no_gpu": "CPU" if reset.isdisjoint(row.no_gpu) else r"CPU\*",
        }
        places = ", ".join(text for column, text in where.items() if getattr(row, column))
        flags, feature = flags_and_feature(row.what)
        shown = ", ".join(map(code, dict.fromkeys(flags)))
        feature = as_code(cell(feature)).removeprefix(f"{shown} ")
        what = ": ".join(filter(None, (shown, feature)))
        rows.append([what, places, as_code(cell(without_leaving_out(row.instead)))])
    rows.sort(key=lambda row: (not row[0].startswith("`--"), row))
    return "\n".join(
        [
            f"# Flags and features that are refused or have no effect\n\n{NOTE}\n",
            "This table lists flags and features of Megatron-LM that are refused. **Leave the flag "
            "out**; the last column gives the reason, or what to use instead. If a flag is "
            "refused, the job prints an error line at startup, and every rank exits with status 2. "
            "[Support](support.md) lists what works. The second column means:\n",
            "- `--epp`: training with `--epp` refuses the flag.\n"
            "- `--epp`\\*: training refuses the flag only if a checkpoint's arguments or Python "
            "code set it. On the command line, it is "
            "[ignored with a warning](#flags-without-effect).\n"
            "- *loops*: `megatron_epp.attach` refuses the feature in "
            "[external training loops](../guides/external_loops.md). Use Megatron's own schedule, "
            "without `attach`.\n"
            "- *calls*: `attach` accepts the model, but Megatron's own schedule runs calls with "
            "this feature, and a log line says so.\n"
            "- *CPU*: training refuses the flag on hosts without a GPU; *CPU*\\*: only without "
            "`--epp`, which ignores the flag with a warning.\n",
            "## Refused\n",
            table(("flags and feature", "refused by", "reason, or instead"), rows),
            "## Flags without effect\n",
            "With `--epp`, these flags of Megatron-LM are reset to values without effect, and rank "
            "0 logs one warning that names them. Results are the same as without the flags:\n",
            bullets(sorted(without_effect())),
        ]
    )


def without_leaving_out(instead: str) -> str:
    """``instead`` less the advice that the page gives once."""
    instead = re.sub("(?:, or )?use Megatron's own schedule, without attach$", "", instead)
    short = re.fullmatch(r"leave (?:it|them|the flag) out(?:: (.+)| \((.+)\))?", instead)
    return (short[1] or short[2] or "") if short else instead


def without_effect() -> Iterator[list[str]]:
    from megatron_epp.mcore.flags.replaced import REPLACED
    from megatron_epp.mcore.kinds.registry import replaced_by_kinds

    options = {action.dest: action.option_strings for action in megatron_parser()._actions}
    for row in dict.fromkeys((*REPLACED, *replaced_by_kinds())):
        names = [options[name][0] for name in row.names.split() if name in options]
        yield [", ".join(map(code, dict.fromkeys(names))), as_code(row.by)]


@cache
def megatron_parser() -> argparse.ArgumentParser:
    """Megatron's flags and ours; with --epp it takes out those without effect."""
    from megatron.training.arguments import add_megatron_arguments

    from megatron_epp.mcore.job.read_flags import with_our_flags

    parser = argparse.ArgumentParser(allow_abbrev=False, conflict_handler="resolve")
    return with_our_flags(add_megatron_arguments(parser))


# ------------------------------------------------------------------ what is supported


BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-query-groups 4 "
    "--kv-channels 16 --seq-length 4096 --attention-dropout 0 --position-embedding-type rope "
    "--calculate-per-token-loss --no-rope-fusion --distributed-backend gloo --transformer-impl"
)


def parsed(words: list[str]) -> argparse.Namespace:
    """Megatron's arguments, with what its validation sets and the capabilities table reads."""
    with mock.patch.object(sys, "argv", ["pretrain_gpt.py", *words]):
        args = megatron_parser().parse_args(words)
    args.dataloader_type = "external"
    args.expert_tensor_parallel_size = (
        args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    )
    return args


def answers(words: str, external: bool) -> Iterator[str]:
    """Whether each of COLUMNS runs a model of these flags, by the capabilities table.

    ``external``: whether external training loops can ask for it.
    """
    from megatron_epp.mcore.capabilities.table import limit_for
    from megatron_epp.mcore.flags.replaced import TAKEN

    layers = "transformer_engine" if "--fp8" in words else "local"
    typed = [*BASE.split(), layers, *words.split()]
    args, config = parsed(["--epp", *typed]), parsed(typed)
    call = SimpleNamespace(config=config, one_model=SimpleNamespace(ddp_config=config))
    model = SimpleNamespace(
        config=config,
        position_embedding_type=config.position_embedding_type,
        max_sequence_length=config.seq_length,
    )

    def runs(*refusals: str | None) -> str:
        return "yes" if refusals == (None,) * len(refusals) else "no"

    taken = " ".join(getattr(args, TAKEN, ()))
    ignored = any(word in taken for word in words.split() if word.startswith("--"))
    trains = "no effect" if ignored else runs(limit_for("training", args))
    yield trains
    loops = limit_for("slices", model), limit_for("slices", call, of_call=True)
    yield runs(*loops) if external else ""
    yield trains if trains != "yes" else runs(limit_for("no_gpu", args))


def support_page() -> str:
    source = tomllib.loads((FOLDER / "support.toml").read_text())
    parts = [f"# What works: support matrix\n\n{NOTE}\n", source["intro"]]
    for section in source["section"]:
        rows = []
        for feature in section["feature"]:
            flags = feature.get("flags", "")
            external = section["external"] and "--epp" not in flags
            asked = f"{flags} {feature.get('with', '')}"
            runs = list(answers(asked, external)) if flags else feature["runs"]
            typed = " ".join(map(code, re.split(" (?=--)", cell(flags))))
            what = "<br>".join(filter(None, (feature["what"], feature.get("note"))))
            rows.append([what, *runs, typed])
        parts.append(f"## {section['title']}\n")
        parts.append(table(("feature", *COLUMNS.values(), "flags"), rows))
    return "\n".join([*parts, source["end"]])


PAGES: dict[str, Callable[[], str]] = {
    "flags.md": flags_page,
    "commands.md": commands_page,
    "refused_flags.md": refused_page,
    "support.md": support_page,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
