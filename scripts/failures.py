"""Failures of every kind at every moment of a training job, and a long job with many failures.

    python scripts/failures.py [WORD ...] [--jobs 3] [--folder failures] [--plan-ahead]
    python scripts/failures.py --soak 2000 [--every 50 150] [--seed 0] [--plan-ahead]

A job trains a small model in float64 over gloo: two pipeline stages on two nodes, each with an
agent of torchrun and one rank. A cell of the matrix injects one failure (for restarts, two): at a
named moment, a process is killed or stopped, its sockets are closed, or it receives nothing more
from the network (tests/attack/strikes.py). The failed job must end by its own timeouts: 60 s
between ranks and between nodes. A lost node is started again, as a resource manager would do; a
process that is stopped or cut off is killed when no other one of its node is alive. Losses must
equal those of an undisturbed job bit for bit, and the job must leave no processes or files. Results
of cells are stored in the folder, so that a second call continues. WORDs select the cells that
contain all of them.

The soak trains two ranks on one node. A random rank is killed every 50 to 150 iterations, and
torchrun restarts both without other help. With --plan-ahead, the job also has a planner process.
"""

import argparse
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.attack import strikes  # noqa: E402
from tests.attack.nodes import Launch, Nodes, be_launchers, losses, worst_difference  # noqa: E402
from tests.attack.strikes import Strike  # noqa: E402
from tests.mcore.runs import flags, write_corpus  # noqa: E402
from tests.waiting import LAST_RESORT_SECONDS, until  # noqa: E402

PROGRAM = str(ROOT / "tests" / "attack" / "struck_training.py")
LENGTHS = [97, 3, 40, 260, 9, 12, 65, 30, 2, 128, 129, 21, 5, 77, 18, 150, 33, 8, 61, 11]
ITERATIONS, AT = 8, 4  # of a cell: a checkpoint every second, an evaluation and the strike at AT
TWO_NODES = Launch("2:2", 1)
MOST_REPLACED = 8
SOAK_NODE, SOAK_INTERVAL = Launch("1:1", 2, 1000), 10


@dataclass(frozen=True, slots=True)
class Cell:
    """Failure at iteration AT; a failure at a restart follows the kill of a rank."""

    strike: Strike

    @property
    def name(self) -> str:
        """Return the words that select this cell."""
        return f"{self.strike.how} {self.strike.target} {self.strike.moment}"

    @property
    def strikes(self) -> list[Strike]:
        """Return all failures of the cell, in order."""
        if self.strike.moment != "restart":
            return [self.strike]
        return [Strike("kill", "rank", "iteration", AT), self.strike]


@dataclass(slots=True)
class Outcome:
    """Result of a cell.

    ended     exit statuses of ranks, as torchrun reports them, and of agents and stopped processes
    line      first line that megatron_epp prints after the failure
    replaced  number of nodes that were started again
    starts    total number of starts of ranks
    worst     largest relative difference of losses
    left      processes and files that the job left
    """

    cell: str
    ended: str
    line: str
    replaced: int
    starts: int
    worst: float
    seconds: float
    left: list[str]
    failure: str = ""

    def row(self) -> str:
        """Return the result as a line of the table."""
        losses = "the same" if self.worst == 0 else f"{self.worst:.1e} off"
        left = ", ".join(self.left) or "nothing"
        failure = f" FAILED: {self.failure}" if self.failure else ""
        return (
            f"| {self.cell} | {self.ended} | {self.line} | {self.replaced} | {self.starts} | "
            f"{losses} | {left} |{failure}"
        )


HEAD = """| strike, target, moment | ended | first line | nodes replaced | starts | losses | left |
|---|---|---|---|---|---|---|"""


def cells(words: Sequence[str]) -> list[Cell]:
    """Return the cells whose names contain all ``words``."""
    found = [
        Cell(Strike(how, target, moment, 0 if moment == "restart" else AT))
        for target in strikes.TARGETS
        for moment in strikes.MOMENTS
        for how in strikes.HOW
    ]
    return [cell for cell in found if set(words) <= set(cell.name.split())]


def main() -> int:
    """Run the selected cells, or the soak; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--jobs", type=int, default=3, help="cells at once: most of them wait")
    parser.add_argument("--folder", type=Path, default=Path("failures"))
    parser.add_argument("--soak", type=int, metavar="ITERATIONS")
    parser.add_argument("--every", type=int, nargs=2, default=(50, 150), metavar="ITERATIONS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plan-ahead", action="store_true")
    be_launchers()
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "documents"
    if not corpus.with_suffix(".idx").exists():
        write_corpus(corpus, LENGTHS * 6)
    if options.soak:
        return soak(options, corpus, folder)
    wanted = cells(options.words)
    if not wanted:
        parser.error(f"no cell has {' '.join(options.words)!r}")
    ahead = {"epp_plan_ahead": True} if options.plan_ahead else {}
    straight = undisturbed(folder, flags_of(ITERATIONS, corpus), "undisturbed")
    print(HEAD, flush=True)
    failed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(lambda cell: kept(cell, corpus, ahead, folder, straight), wanted):
            print(outcome.row(), flush=True)
            failed += bool(outcome.failure)
    print(f"\n{len(wanted)} cells, {failed} failed")
    return int(failed > 0)


def flags_of(iterations: int, corpus: Path, **how: object) -> list[str]:
    """Return the flags of a job."""
    how = {"epp": True, "epp_effort": 0, "global_batch_size": 4, "clip_grad": 0, **how}
    how |= {"train_iters": iterations, "lr_decay_iters": 100_000, "lr_decay_style": "constant"}
    how |= {"split": "80,20,0", "eval_iters": 1, "eval_interval": how.get("eval_interval", AT)}
    return flags(corpus, **how, distributed_timeout_minutes=1)


def undisturbed(folder: Path, words: list[str], name: str) -> dict[int, float]:
    """Return the losses of a job without failures, by iteration; run the job if needed."""
    path = folder / f"{name}.json"
    if not path.exists():
        with Nodes(folder / name, PROGRAM, words, Launch("1:1", 2, 0)) as nodes:
            nodes.start(0)
            nodes.agents[0].join()
            assert nodes.agents[0].exitcode == 0, nodes.said[-2000:]
            assert not nodes.left(), nodes.left()
            path.write_text(json.dumps(losses(nodes.said)))
    return {int(i): loss for i, loss in json.loads(path.read_text()).items()}


# ------------------------------------------------------------------ the matrix


def kept(
    cell: Cell,
    corpus: Path,
    ahead: dict[str, object],
    folder: Path,
    straight: Mapping[int, float],
) -> Outcome:
    """Return the stored outcome of the cell; run it if there is none, or if it failed."""
    path = folder / f"{cell.name.replace(' ', '-')}.json"
    if path.exists() and not (done := Outcome(**json.loads(path.read_text()))).failure:
        return done
    saved = path.with_suffix("") / "saved"
    saves = {"save": saved, "load": saved, "save_interval": 2}
    words = flags_of(ITERATIONS, corpus, **saves, **ahead)
    outcome = run(cell, words, path.with_suffix(""), straight)
    path.write_text(json.dumps(asdict(outcome)))
    return outcome


def run(cell: Cell, words: list[str], own: Path, straight: Mapping[int, float]) -> Outcome:
    """Run a job with the cell's failures, restart its nodes until it ends; return the outcome."""
    shutil.rmtree(own, ignore_errors=True)
    began, replaced, failure = time.monotonic(), 0, ""
    statuses: list[str] = []
    with Nodes(own, PROGRAM, words, TWO_NODES, cell.strikes) as nodes:
        nodes.start(0)
        nodes.start(1)
        while True:
            trained = len(losses(nodes.said)) == ITERATIONS
            for node in [node for node in nodes.agents if nodes.is_stuck(node)]:
                nodes.kill(node)
                statuses.append(f"node {node}: stopped or cut off, then killed")
            for node in [node for node in nodes.agents if nodes.has_ended(node)]:
                statuses.append(f"agent {node}: {nodes.agents.pop(node).exitcode}")
            if trained and not nodes.agents:
                break
            if time.monotonic() - began > LAST_RESORT_SECONDS or replaced > MOST_REPLACED:
                failure = "no end"
                break
            for node in () if trained else {0, 1} - nodes.agents.keys():
                nodes.start(node)
                replaced += 1
            time.sleep(1)
        said, left = nodes.said, nodes.left()
    struck = said.count("\nstrike ")
    after = said.rpartition("\nstrike ")[2].splitlines()
    lines = [line for line in after if line.startswith("megatron_epp: ")]
    ranks = re.findall(r"failed \(exitcode: (-?\d+)\) local_rank", said)
    worst = worst_difference(said, straight)
    for wrong, what in (
        (struck != len(cell.strikes), f"{struck} strikes"),
        (worst, "other losses"),
        (left, "something is left"),
    ):
        failure = failure or (what if wrong else "")
    ended = "; ".join([f"ranks {' '.join(ranks) or 'none'}", *statuses])
    starts = said.count("\nstart: rank 0\n")
    line = (lines or ["none"])[0].removeprefix("megatron_epp: ")
    seconds = time.monotonic() - began
    return Outcome(cell.name, ended, line, replaced, starts, worst, seconds, left, failure)


# ------------------------------------------------------------------ the soak


def soak(options: argparse.Namespace, corpus: Path, folder: Path) -> int:
    """Train many iterations while random ranks are killed; return the exit status."""
    iterations, random = options.soak, Random(options.seed)
    how = {"eval_interval": iterations, **({"epp_plan_ahead": True} if options.plan_ahead else {})}
    words, name = flags_of(iterations, corpus, **how), f"soak-{iterations}"
    with ThreadPoolExecutor(1) as beside:
        straight = beside.submit(undisturbed, folder, words, f"{name}-straight")
        own = folder / f"{name}-{options.seed}"
        shutil.rmtree(own, ignore_errors=True)
        saves = {"save": own / "saved", "load": own / "saved", "save_interval": SOAK_INTERVAL}
        words = flags_of(iterations, corpus, **how, **saves)
        draw = partial(random.randint, *options.every)
        return soaked(words, own, draw, random, iterations, straight.result)


def soaked(
    words: list[str],
    own: Path,
    draw: Callable[[], int],
    random: Random,
    iterations: int,
    straight: Callable[[], Mapping[int, float]],
) -> int:
    """Train with a kill after every ``draw()`` iterations; compare losses with ``straight``."""
    began, kills, at = time.monotonic(), [], draw()
    with Nodes(own, PROGRAM, words, SOAK_NODE) as nodes:
        nodes.start(0)
        while nodes.agents[0].exitcode is None:
            due = at < iterations and nodes.last_iteration() >= at
            if due and (ranks := nodes.ranks()):
                os.kill(random.choice(ranks), signal.SIGKILL)
                kills.append(at)
                at += draw()
            time.sleep(0.1)
        until(lambda: not nodes.members(), lambda: nodes.said[-600:])
        said, left, status = nodes.said, nodes.left(), nodes.agents[0].exitcode
    seconds = time.monotonic() - began
    trained, worst = len(losses(said)), worst_difference(said, straight())
    starts = said.count("\nstart: rank 0\n")
    print("| iterations | kills | starts | status | losses | left | wall time |\n|" + "---|" * 7)
    print(
        f"| {trained} of {iterations} | {len(kills)} | {starts} | {status} | "
        f"{f'{worst:.1e} off' if worst else 'the same'} | {', '.join(left) or 'nothing'} | "
        f"{seconds:.0f} s |"
    )
    return int(bool(status or worst or left or trained != iterations))


if __name__ == "__main__":
    sys.exit(main())
