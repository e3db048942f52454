"""Restarts on fewer or more devices: nodes are killed, and torchrun restarts the job on the others.

    python scripts/restarts.py [--seeds 10] [--folder restarts] [--jobs 3] [--rows WORD ...]

Every row trains a small model in float64 over gloo, on "nodes" of two ranks, each with its own
agent of torchrun. A whole node is killed when a random iteration ends. torchrun restarts the other
nodes, and the job continues from its last checkpoint with the layout that --epp-layouts names for
them. Then another node is killed, and finally all nodes return. Losses may differ from those of an
undisturbed run by at most 1e-12. Results of rows are stored, so that a second call continues.
"""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.attack.nodes import (  # noqa: E402
    Launch,
    Nodes,
    be_launchers,
    losses,
    worst_difference,
)
from tests.mcore.runs import flags, write_corpus  # noqa: E402
from tests.waiting import until  # noqa: E402

BOUND, ITERATIONS = 1e-12, 12
PROGRAM = str(ROOT / "tests" / "mcore" / "double_losses.py")
LENGTHS = [97, 3, 40, 260, 9, 12, 65, 30, 2, 128, 129, 21, 5, 77, 18, 150, 33, 8, 61, 11]
EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "expert_tensor_parallel_size": 1,
}


@dataclass(frozen=True, slots=True)
class Row:
    """Lines of the file of layouts, number of nodes at each start, and additional flags."""

    layouts: str
    nodes: tuple[int, ...]
    model: dict[str, object]


ROWS = {
    "pipelines": Row("pp 2\n", (3, 2, 1, 3), {}),
    "spares": Row("pp 3 layers 1 1 2\n", (3, 2, 3), {}),
    "experts": Row("cp 2 ep 2\n", (3, 2, 1), EXPERTS),
    "lockstep": Row("ep 2\n", (2, 1), EXPERTS),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=3, help="rows at once: nodes wait much")
    parser.add_argument("--folder", type=Path, default=Path("restarts"))
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS])
    be_launchers()
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    options.folder.mkdir(parents=True, exist_ok=True)
    corpus = options.folder / "documents"
    if not corpus.with_suffix(".idx").exists():
        write_corpus(corpus, LENGTHS * 6)

    def done(name: str, seed: int) -> dict:
        kept = options.folder / f"{name}-{seed}.json"
        if not kept.exists():
            kept.write_text(json.dumps(row(ROWS[name], seed, corpus, options.folder / name)))
        return json.loads(kept.read_text())

    wanted = [(name, seed) for seed in range(options.seeds) for name in options.rows]
    worst = 0.0
    print("| row | seed | ranks that train / devices, by start | worst difference |")
    print("|---|---|---|---|", flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        for (name, seed), found in zip(
            wanted, pool.map(done, *zip(*wanted, strict=True)), strict=True
        ):
            worst = max(worst, found["worst"])
            starts = ", ".join(found["ranks"])
            print(f"| {name} | {seed} | {starts} | {found['worst']:.1e} |", flush=True)
    return int(worst > BOUND)


def row(row: Row, seed: int, corpus: Path, folder: Path) -> dict:
    """Train undisturbed, then with kills; return the worst loss difference, and ranks by start."""
    random, folder = Random(seed), folder.with_name(f"{folder.name}-{seed}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "layouts").write_text(row.layouts)
    how = {
        "epp": True,
        "global_batch_size": 5,
        "train_iters": ITERATIONS,
        "clip_grad": 0,
        "epp_effort": 0,
        "seed": seed + 1,
    }
    how |= {"lr_decay_style": "constant", "epp_layouts": folder / "layouts", **row.model}
    how["pipeline_model_parallel_size"] = None
    straight = losses(job(flags(corpus, **how), row.nodes[:1], [], folder / "straight"))
    assert len(straight) == ITERATIONS, f"{folder}/straight"
    saved = {"save": folder / "saved", "load": folder / "saved", "save_interval": 1}
    at = sorted(random.sample(range(1, ITERATIONS - 2), len(row.nodes) - 1))
    output = job(flags(corpus, **how, **saved), row.nodes, at, folder / "killed")
    assert len(losses(output)) == ITERATIONS, f"{folder}/killed"
    worst = worst_difference(output, straight)
    ranks = re.findall(r"--epp-layouts .* on (\d+) of (\d+) devices", output)
    return {"worst": worst, "ranks": ["/".join(pair) for pair in ranks]}


def job(words: Sequence[str], counts: Sequence[int], kills: Sequence[int], folder: Path) -> str:
    """Run on ``counts[0]`` nodes; kill or add nodes after iterations ``kills``; return output."""
    with Nodes(folder, PROGRAM, words, Launch(f"1:{max(counts)}", 2)) as nodes:
        for node in range(counts[0]):
            nodes.start(node)
        for iteration, count in zip(kills, counts[1:], strict=False):
            until(
                lambda at=iteration: nodes.last_iteration() >= at or has_failed(nodes),
                lambda: nodes.said[-600:],
            )
            assert not has_failed(nodes), f"{nodes.log}: torchrun has ended"
            for node in range(count, len(nodes.agents)):
                nodes.kill(node)
            for node in range(len(nodes.agents), count):
                nodes.start(node)
        until(lambda: all(map(nodes.has_ended, nodes.agents)), lambda: nodes.said[-600:])
        statuses = [agent.exitcode for agent in nodes.agents.values()]
        assert not any(statuses), f"{nodes.log}: {statuses}"
        assert not nodes.left(), f"{nodes.log}: left {nodes.left()}"
        return nodes.said


def has_failed(nodes: Nodes) -> bool:
    """Return whether an agent has ended with a nonzero status."""
    return any(agent.exitcode for agent in nodes.agents.values())


if __name__ == "__main__":
    sys.exit(main())
