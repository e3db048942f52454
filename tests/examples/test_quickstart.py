"""The quickstart's settings: refused where they are wrong, and flags that Megatron and we know."""

import argparse
import re

import pytest

from tests.mcore import runs
from tests.programs import BASH, ROOT, run

pytestmark = pytest.mark.everything

SCRIPT = ROOT / "examples" / "quickstart.sh"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"SIZE": "9k"}, "SIZE=9k: expected 24k or 4k"),
        ({"BATCH": "0"}, "BATCH=0: expected a whole number of at least 1"),
        ({"ITERS": "2"}, "ITERS=2: expected more than the 2 iterations of warm-up"),
        ({"SIZE": "4k", "ITERS": "4"}, "ITERS=4: expected more than the 4 iterations of warm-up"),
        ({"BUDGET": "much"}, "BUDGET=much: expected GiB, as in 0.5"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, str], line: str) -> None:
    done = run(BASH, SCRIPT, **settings)
    assert (done.returncode, done.stderr) == (2, f"quickstart: {line}\n")
    assert not done.stdout


def test_help_says_what_it_runs_on() -> None:
    done = run(BASH, SCRIPT, "--help")
    assert done.returncode == 0 and "on the CPU alone" in done.stdout
    assert "set -euo" not in done.stdout


def test_its_flags_exist() -> None:
    from megatron.training.arguments import add_megatron_arguments

    from megatron_epp.mcore.flags.config import add_arguments

    parser = add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    known = {flag for action in parser._actions for flag in action.option_strings}
    text = SCRIPT.read_text()
    ours = text[text.index("case ${SIZE") : text.index("for name in")]
    ours += text[text.index("flags() {") : text.index("run() {")]
    ours += text[text.index('say "1 of 4') :]
    flags = set(re.findall(r"(?<!\S)--[a-z][a-z0-9-]+", ours))
    assert len(flags) > 30
    assert flags <= known, flags - known


def test_the_first_quickstart_is_still_there() -> None:
    """SIZE=4k: the flags of which the first quickstart's losses came."""
    text = SCRIPT.read_text()
    sizes = text[text.index("\n4k)") :] if "\n4k)" in text else text[text.index("    4k)") :]
    sizes = sizes[: sizes.index(";;")]
    assert "settings=(4096 8 14 3 1 4)" in sizes
    for flag in (
        *("--num-layers 6", "--hidden-size 256", "--ffn-hidden-size 688"),
        *("--num-attention-heads 4", "--num-query-groups 2"),
        *("--decoder-first-pipeline-num-layers 4", "--decoder-last-pipeline-num-layers 2"),
    ):
        assert flag in sizes


def test_every_batch_is_computed_four_times(tmp_path) -> None:
    """One warm-up, then the four ways, each with the log line of any run."""
    corpus = runs.write_corpus(tmp_path / "corpus", runs.LENGTHS)
    words = runs.flags(corpus, epp=True, epp_record=tmp_path / "record", train_iters=5)
    run = runs.trained(words, program=(str(ROOT / "examples" / "quickstart_turns.py"),))
    assert len(run.losses) == 5
    tokens = re.findall(r"epp iteration \d+: (\d+) tokens in", run.output)
    assert len(tokens) == 5 and len(set(tokens)) == 1
