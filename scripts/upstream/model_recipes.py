#!/usr/bin/env python3
"""Certificates of Megatron-LM's own example configurations, with their original flags.

    scripts/upstream/model_recipes.py [NAME ...] [--pp 2] [--batches 2] [--list] [-o RESULT.md]

The flags and the source of each are in model_recipes.toml. ``certify`` scales the models down and
preserves their structure. If the layers do not divide over the stages, ``certify`` must print one
line that names the necessary flags, and pass with these flags. The script prints a table; the exit
status is 1 if a configuration is not certified.
"""

import argparse
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Configuration: its source file, model flags, and ``layout``.

    ``layout`` are the flags that assign its layers to two stages if they do not divide evenly.
    """

    source: str
    flags: str
    layout: str = ""

    @property
    def words(self) -> list[str]:
        return self.flags.split()


def read_recipes() -> dict[str, Recipe]:
    """Return the recipes of model_recipes.toml, with the flags of their families."""
    read = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    families: dict[str, str] = {}
    for name, flags in read["families"].items():
        families[name] = flags.format(**families)
    return {
        name: Recipe(**facts | {"flags": facts["flags"].format(**families)})
        for name, facts in read["recipes"].items()
    }


RECIPES = read_recipes()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Worst error of a recipe, or the line that rejected it.

    ``model`` describes the certified model; ``first`` is the line that requested a layout.
    """

    passed: bool
    said: str
    model: str = ""
    first: str = ""


def outcome_of(recipe: Recipe, pp: int, batches: int) -> Outcome:
    """Certify a recipe, first with its original flags, then with its layout."""
    if recipe.layout and pp == 2:
        without = _certified(recipe.words, pp, 1)
        if without.passed:
            return without
        done = _certified([*recipe.words, *recipe.layout.split()], pp, batches)
        named = all(word in without.said for word in recipe.layout.split() if word.startswith("-"))
        return Outcome(done.passed and named, done.said, done.model, without.said)
    return _certified(recipe.words, pp, batches)


def _certified(words: list[str], pp: int, batches: int) -> Outcome:
    from megatron_epp.certify.command import certify
    from megatron_epp.certify.degrees import Degrees
    from megatron_epp.certify.processes import ChildLost
    from megatron_epp.certify.trial import Trial
    from megatron_epp.mcore.certify.backend import MEGATRON

    lines: list[str] = []
    try:
        judged = certify(MEGATRON, Trial(Degrees(pp, 1, 1), (tuple(words),), batches), lines.append)
    except (ValueError, ChildLost) as refusal:
        return Outcome(False, str(refusal).splitlines()[0])
    worst = max(max(batch.loss_error, batch.gradient_error) for batch in judged)
    passed = all(batch.passed for batch in judged)
    why = [line for batch in judged for line in (*batch.problems, *batch.routing)]
    model = lines[0].splitlines()[0].split(": ", 1)[1]
    return Outcome(passed, "; ".join([f"{worst:.1e}", *why[:1]]), model)


HEADERS = ("configuration", "certified", "worst error, or why not", "as scaled down")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages (default: 2)")
    parser.add_argument("--batches", type=int, default=2, help="of each (default: 2)")
    parser.add_argument("--list", action="store_true", help="print names and sources")
    parser.add_argument("-o", "--output", metavar="FILE", help="append the table as markdown")
    args = parser.parse_args()
    for name in args.names:
        if name not in RECIPES:
            parser.error(f"no recipe {name!r}; known: {', '.join(RECIPES)}")
    if args.list:
        for name, recipe in RECIPES.items():
            print(f"{name:18} {recipe.source}")
        return 0
    from headline import heading, host, markdown, write

    from megatron_epp.show.table import text_table

    table, failed = [], 0
    for name in args.names or RECIPES:
        began = time.monotonic()
        found = outcome_of(RECIPES[name], args.pp, args.batches)
        failed += not found.passed
        table.append([name, "yes" if found.passed else "no", found.said, found.model])
        print(f"{name}: {'certified' if found.passed else 'NOT certified'}, {found.said} "
              f"({time.monotonic() - began:.0f} s)", flush=True)  # fmt: skip
        if found.first:
            print(f"    without {RECIPES[name].layout}: {found.first}", flush=True)
    print(text_table(HEADERS, table))
    write(args.output, heading(f"{host()}, --pp {args.pp}") + markdown(HEADERS, table) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
