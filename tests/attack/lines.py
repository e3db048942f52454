"""Odd command lines: each is refused in one line with status 2, or it runs."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.attack.commands import EPP, PRETRAIN, Ended, run
from tests.attack.jobs import flags
from tests.attack.material import Material
from tests.mcore.runs import write_corpus

REFUSED = "refused"  # must be
RUNS = "runs"  # must
EITHER = "refused or runs"
SECONDS = 60.0

# Words in the place of a good job's, and whether it is refused. More: tests/mcore/test_flags.py,
# test_refusals.py.
TRAINING = (
    ({"epp_memory_budget_gib": "nan"}, REFUSED),
    ({"epp_memory_budget_gib": "1e308"}, REFUSED),
    ({"epp_memory_budget_gib": "0"}, REFUSED),
    ({"epp_memory_budget_gib": "1e-9"}, REFUSED),
    ({"epp_memory_budget_gib": "1 2"}, REFUSED),
    ({"epp_memory_budget_gib": "lots"}, REFUSED),
    ({"epp_host_memory_gib": "nan"}, REFUSED),
    ({"epp_host_memory_gib": "0"}, REFUSED),
    ({"epp_host_memory_gib": "9e5"}, REFUSED),
    ({"epp_levers": ""}, EITHER),
    ({"epp_levers": "nope"}, REFUSED),
    ({"epp_levers": "default,-nope"}, REFUSED),
    ({"epp_levers": "offload"}, REFUSED),
    ({"epp_planner": ""}, REFUSED),
    ({"epp_planner": "flexsp"}, REFUSED),
    ({"epp_planner": "epp epp"}, REFUSED),
    ({"epp_effort": "1.5"}, REFUSED),
    ({"epp_attention": "nope"}, REFUSED),
    ({"epp_overlong": "nope"}, REFUSED),
    ({"epp_cost_model": "/nope"}, REFUSED),
    ({"epp_cost_model": "."}, REFUSED),
    ({"epp_plan": "/nope"}, REFUSED),
    ({"epp_plan": "."}, REFUSED),
    ({"epp_plan": "/dev/zero"}, REFUSED),
    ({"epp_record": "/dev/null/x"}, REFUSED),
    ({"epp_nope": "1"}, REFUSED),
    ({"epp_budget_gib": "1"}, REFUSED),
    ({"data_path": "/nope"}, REFUSED),
    ({"seq_length": "0"}, REFUSED),
    ({"global_batch_size": "0"}, REFUSED),
    ({"micro_batch_size": "2"}, RUNS),
    ({"load": "/nope"}, EITHER),
    ({"train_iters": "1"}, RUNS),
)
# They start processes of their own before they read some of their flags.
DOING = (
    ("certify", "--nope"),
    ("certify", "--batches", "0"),
    ("certify", "--pp", "65"),
    ("certify", "--pp", "-1"),
    ("certify", "--num-layers", "x"),
    ("certify", "--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "0"),
    ("profile", "--nope"),
    ("profile", "--pp", "0"),
    ("profile", "--num-layers", "2"),
    ("profile", "-o", "/nope/x.json", "--num-layers", "2", "--hidden-size", "64"),
)

# What no option that takes a number may choke on.
ODD_NUMBERS = ("", " ", "-1", "0", "1.5", "1e3", "nan", "inf", "-inf", "1e308", "1e-320", "0x10")
ODD_NUMBERS += ("٣", "1_0", "9" * 30, "true", "1,2", "1 2", "½", "é" * 200)
NUMBERS = {
    "plan": "--context --global-batch-size --seed --batch --pp --cp --devices --tp --dp --layers "
    "--memory-budget-gib --zero --b1-divisor --effort --multiple --host-memory-gib",
    "simulate": "--noise --seed --replica --tp --dp --memory-budget-gib",
    "draw": "--width --replica --layers",
    "compare": "--batches --first-batch",
}


# What a command chose, said before it plans.
SAID = "placement:", "partition:", "vocabulary parallelism:"


@dataclass(frozen=True, slots=True)
class Line:
    """A command line and what may come of it. ``program``: see :func:`run`."""

    words: tuple[str, ...]
    may: str = EITHER
    stdin: str = ""
    program: tuple[str, ...] = EPP
    seconds: float = SECONDS

    def __str__(self) -> str:
        """The words that can be told apart: paths by their names, the first and the last ones."""
        words = [Path(word).name if word.startswith("/") else word for word in self.words]
        words = [word if re.fullmatch(r"[\w./,=-]+", word) else ascii(word) for word in words]
        shown = " ".join(words)
        return shown if len(shown) < 160 else f"{shown[:30]} ... {shown[-120:]}"


def judge(line: Line, ended: Ended) -> str | None:
    """Say what gave way; None: the line ended as it should."""
    said = f": {ended.lines[-1][:160]}" if ended.lines else ""
    if ended.status is None:
        return f"still running after {line.seconds:.0f} s"
    if ended.status not in (0, 2):
        return f"exit status {ended.status}{said}"
    ours = [one for one in ended.lines if not one.startswith(SAID)]
    if line.program == PRETRAIN:  # torch and Megatron say and warn of much
        ours = [one for one in ours if "megatron_epp" in one and "site-packages" not in one]
    for word in ("Traceback", "Warning"):
        if word in ("\n".join(ours) if word == "Warning" else ended.err):
            return f"a {word} on stderr{said}"
    if ended.left:
        return f"left running: {[words[-80:] for words in ended.left]}"
    if ended.status == 0:
        if "the planner failed" in ended.out:
            return "trained on what packing planned, as the planner's service failed"
        return "accepted" if line.may == REFUSED else None
    if line.may == RUNS:
        return f"refused{said}"
    if len(ours) != 1:
        return f"{len(ours)} lines on stderr{said}"
    if not ours[0].startswith("megatron_epp: error: "):
        return f"a line that is not ours{said}"
    return None


def run_lines(lines: Sequence[Line], folder: Path) -> None:
    """Run all. AssertionError: names every line that did not end as it should."""
    wrong = []
    scratch, temporary = folder / "cwd", folder / "tmp"
    for made in (scratch, temporary):
        made.mkdir()
    for line in lines:
        ended = run(
            line.words,
            program=line.program,
            stdin=line.stdin,
            folder=scratch,
            environment={"TMPDIR": str(temporary)},
            seconds=line.seconds,
        )
        if (why := judge(line, ended)) is not None:
            wrong.append(f"{line}: {why}")
        elif left := [path.name for path in temporary.iterdir() if "megatron_epp" in path.name]:
            wrong.append(f"{line}: left {left} behind")
            for name in left:
                (temporary / name).rename(folder / f"left-{len(wrong)}-{name}")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(lines)} lines wrong", *wrong])


def _words(material: Material, command: str) -> tuple[str, ...]:
    """A good command line of ``command``."""
    if command in ("plan", "compare"):
        named = ("--planner", "packing", "epp") if command == "compare" else ()
        return (command, *material.plan_words[1:], *named)
    if command == "simulate":
        return (command, str(material("good.plan")), *material.machine_words)
    return (command, str(material("good.plan")))


def odd_numbers(material: Material) -> Iterator[Line]:
    for command, options in NUMBERS.items():
        base = _words(material, command)
        for option in options.split():
            for number, value in enumerate(ODD_NUMBERS):
                # --option=value and --option value are read by two branches of the parser.
                given = (f"{option}={value}",) if number % 2 else (option, value)
                yield Line((*base, *given))


def _dashes(material: Material) -> Iterator[Line]:
    """argparse takes ``--`` for the end of the options, wherever it stands."""
    for command, options in NUMBERS.items():
        for option in options.split():
            yield Line((*_words(material, command), f"{option}=--"), REFUSED)
    yield Line((*_words(material, "plan"), "--planner=--"), REFUSED)
    yield Line((*_words(material, "plan"), "--", "x"), REFUSED)


def odd_words(material: Material) -> Iterator[Line]:
    plan, good = _words(material, "plan"), str(material("good.plan"))
    yield Line((), REFUSED)
    for word in ("", "-", "--", "-x", "plann", "plan plan", "../plan", "__main__", "options", "é"):
        yield Line((word,), REFUSED)
    for command in ("plan", "compare", "simulate", "draw", "check"):
        base = _words(material, command)
        yield Line((command, "--help"), RUNS)
        yield Line((command,), REFUSED)
        yield Line((*base, "--"), EITHER)
        yield Line((*base, "--foo"), REFUSED)
        yield Line((*base, "stray"), REFUSED)
        yield Line((*base, "--model=nope"), REFUSED)
        yield Line((*base, "--device=nope"), REFUSED)
        yield Line((*base, "--cost-model", "/nope/x.json"), REFUSED)
        yield Line((*base, "--cost-model", "."), REFUSED)
    for option in ("--planner", "--levers", "--overlong", "--zero", "--lengths", "--model", "-o"):
        for value in (
            "",
            "nope",
            "epp,epp",
            "all,-nope",
            "-",
            ",",
            "default,-wsplit",
            "\n",
            "a\nb",
        ):
            yield Line((*plan, f"{option}={value}"))
    for value in ("x.svg", "x.png", "x.html", "x.txt", "x.json", "x.csv"):
        yield Line(("draw", good, "-o", value), REFUSED if value == "x.csv" else RUNS)
        yield Line(("draw", good, "-o", f"/nope/{value}"), REFUSED)
    for value in ("x", "x.pdf", ".svg", "", "/dev/full.svg", "x.svg/", ".", "/"):
        yield Line(("draw", good, "-o", value))
    for title in ("", "a\x01b", "<script>alert(1)</script>", "]]>", "x" * 5000, "‮", "\udcff"):
        yield Line(("draw", good, "--title", title, "-o", "t.svg"))
    for width in ("39", "40", "100000", "100001"):
        yield Line(("draw", good, "--width", width))
    for path in ("", ".", "/", "/nope", "/dev/null", "/proc/self/mem", "no\nsuch", "x" * 5000, "~"):
        yield Line(("check", path), REFUSED)
        yield Line(("draw", path), REFUSED)
        yield Line(("simulate", path, *material.machine_words), REFUSED)
        yield Line((*plan, "--lengths", path), REFUSED)
        yield Line((*plan, "--cost-model", path), REFUSED if path else EITHER)
    yield Line(("check", "-"), RUNS, stdin=Path(good).read_text())
    yield Line(("check", "-"), REFUSED, stdin="")
    yield Line(("check", "-"), REFUSED, stdin="plan v1\n")


def _misfits(material: Material) -> Iterator[Line]:
    plan, good = _words(material, "plan"), str(material("good.plan"))
    machine = material.machine_words
    profile = ("--cost-model", str(material("profile.json")), "--layers", "2", "2")
    batch = ("--lengths", str(material("lens.txt")), "--pp", "2", "--memory-budget-gib", "1")
    yield Line(("plan", *batch, *profile), RUNS)
    refused = "--pp 5", "--layers 4", "--layers 1 2 1", "--layers 0 0", "--dp 9", "--dp 1000000"
    refused += "--memory-budget-gib 1 1 1", "--memory-budget-gib 1e-6", "--memory-budget-gib 1e-300"
    refused += "-o /dev/full", "-o ."
    run = "--forward-only", "-o /dev/null", "--json"
    either = "--layers 4 0", "--cp 3", "--tp 3", "--tp 1000", "--cp 1000", "--devices 4", "--zero 3"
    either += "--pp auto", "--pp auto --devices 4", "--pp auto --devices 7 --cp auto"
    either += "--planner infinipipe --levers all", "--context 1 --overlong drop"
    either += "--context 1 --overlong split", "--context 1 --global-batch-size 3"
    either += "--global-batch-size 9", "--batch 3"
    for rows, may in ((refused, REFUSED), (run, RUNS), (either, EITHER)):
        for row in rows:
            yield Line((*plan, *row.split()), may)
    for planner in ("epp", "infinipipe", "seq1f1b", "chunkflow", "packing", "flexsp"):
        yield Line((*plan, "--planner", planner))
        yield Line((*plan, "--planner", planner, "--cp", "2", "--dp", "2"))
    yield Line(("simulate", good), EITHER)
    yield Line(("simulate", good, *machine, "--replica", "1"), REFUSED)
    yield Line(("simulate", str(material("good.step")), *machine, "--replica", "1"), RUNS)
    yield Line(("simulate", good, *machine, "--layers", "1", "1"), EITHER)
    yield Line(("simulate", good, *machine, "--dp", "3"), EITHER)
    yield Line(("simulate", good, *machine, "-o", "/dev/full"), REFUSED)
    yield Line(("simulate", good, "--model", "llama3-8b", "--device", "h100-80g"), EITHER)
    yield Line(("draw", good, "--records", str(material("good.timed"))), RUNS)
    yield Line(
        ("draw", str(material("good.step")), "--records", str(material("good.timed"))), EITHER
    )
    yield Line(("draw", good, "--records", good), REFUSED)
    yield Line(("check", str(material("good.timed"))), REFUSED)
    yield Line(("check", good, *machine), RUNS)
    yield Line(("check", str(material("model.json"))), REFUSED)
    yield Line((*plan, "--model", str(material("device.json"))), REFUSED)
    yield Line((*plan, "--device", str(material("model.json"))), REFUSED)
    yield Line((*plan, "--cost-model", str(material("model.json"))), REFUSED)
    yield Line((*plan, "--lengths", good), REFUSED)
    yield Line((*plan, "--lengths", str(material("corpus.bin"))), REFUSED)
    yield Line((*plan, "--lengths", str(material("corpus"))), EITHER)
    yield Line((*plan, "--lengths", str(material("corpus.idx"))), RUNS)


def _too_large(material: Material) -> Iterator[Line]:
    plan = _words(material, "plan")
    for option in ("--multiple", "--context", "--global-batch-size", "--seed", "--tp", "--cp"):
        yield Line((*plan, option, "999999999999999"))
    yield Line((*plan, "--global-batch-size", "100000000"), REFUSED)
    yield Line((*plan, "--memory-budget-gib", "1e300"), EITHER)
    yield Line((*plan, "--memory-budget-gib", "1e308"), REFUSED)
    yield Line((*plan, "--b1-divisor", "1e-300"))
    yield Line((*plan, "--b1-divisor", "1e300"))
    yield Line((*plan, "--pp", "999999999999999"), REFUSED)
    yield Line((*plan, "--devices", "999999999999999", "--pp", "auto"))
    long = ("--context", "1", "--overlong", "split")
    yield Line(
        (*plan, "--lengths", _lengths(material, "l_1e9.txt", "1000000000\n"), *long), REFUSED
    )
    yield Line((*plan, "--lengths", _lengths(material, "l_1e15.txt", "999999999999999\n")))
    yield Line((*plan, "--lengths", _lengths(material, "l_1e99.txt", "9" * 99 + "\n")), REFUSED)
    yield Line((*plan, "--lengths", _lengths(material, "zeros.txt", "0\n0\n")), REFUSED)
    stages = 2000
    orders = "".join(f"stage {stage}: F0 B0\n" for stage in range(stages))
    chunk = "documents 5\nlayers" + " 1" * stages + "\nchunk 0: 0[0:5]\n"
    recompute = "".join(f"recompute {stage}: 1k\n" for stage in range(stages))
    deep = _lengths(material, "stages.plan", f"plan v1\n{chunk}{recompute}{orders}")
    yield Line(("check", deep))
    yield Line(("draw", deep))


def _lengths(material: Material, name: str, text: str) -> str:
    material(name).write_text(text)
    return str(material(name))


GROUPS = {
    "odd numbers": odd_numbers,
    "odd words": odd_words,
    "two dashes as a value": _dashes,
    "what does not fit together": _misfits,
    "numbers that are too large": _too_large,
}


@pytest.mark.parametrize("name", GROUPS)
def test_lines_are_refused_in_one_line_or_run(material: Material, tmp_path: Path, name: str):
    run_lines(list(GROUPS[name](material)), tmp_path)


def test_flags_of_a_training(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "documents", [30, 129, 200, 64, 2, 17, 90, 5, 33, 48, 12, 101])
    one = {"pipeline_model_parallel_size": 1, "train_iters": 2}
    lines = [
        Line(tuple(flags(corpus, **{**one, **changes})), may, program=PRETRAIN, seconds=120)
        for changes, may in TRAINING
    ]
    run_lines(lines, tmp_path)


def test_flags_of_certify_and_profile(tmp_path: Path) -> None:
    run_lines([Line(words, REFUSED, seconds=120) for words in DOING], tmp_path)
