"""Restarts on other numbers of devices: a node is killed, torchrun starts the job on what is left.

    python scripts/restarts.py [--seeds 10] [--folder restarts] [--rows WORD ...]

Every row trains a small model in float64 over gloo, on "nodes" of two processes, each with an agent
of torchrun of its own. At a random iteration one node is killed outright; torchrun restarts the
others, and the job goes on from its last checkpoint with the layout that --epp-layouts has for
them; then another node is killed; then all come back. Losses are compared with those of an
undisturbed run: at most 1e-12 apart. A row that is done is kept, so that a second call
goes on.
"""

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.mcore.runs import flags, write_corpus  # noqa: E402

BOUND, ITERATIONS, PATIENCE_SECONDS = 1e-12, 12, 600.0
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
    """layouts: lines of the file; nodes: that each start has; model: flags besides."""

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
    parser.add_argument("--folder", type=Path, default=Path("restarts"))
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS])
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    corpus = options.folder / "documents"
    if not corpus.with_suffix(".idx").exists():
        write_corpus(corpus, LENGTHS * 6)
    worst = 0.0
    print(f"{'row':<12} {'seed':>4} {'starts':>24} {'restarts':>8} {'worst':>8}", flush=True)
    for name in options.rows:
        for seed in range(options.seeds):
            kept = options.folder / f"{name}-{seed}.json"
            if not kept.exists():
                kept.write_text(json.dumps(row(ROWS[name], seed, corpus, options.folder / name)))
            done = json.loads(kept.read_text())
            worst = max(worst, done["worst"])
            starts = " ".join(map(str, done["ranks"]))
            print(f"{name:<12} {seed:>4} {starts:>24} {done['kills']:>8} {done['worst']:>8.1e}")
    return int(worst > BOUND)


def row(row: Row, seed: int, corpus: Path, folder: Path) -> dict:
    """Train undisturbed, then with kills; return how far losses are apart."""
    random, folder = Random(seed), folder.with_name(f"{folder.name}-{seed}")
    folder.mkdir(exist_ok=True)
    (folder / "layouts").write_text(row.layouts)
    how = {
        "epp": True,
        "global_batch_size": 5,
        "train_iters": ITERATIONS,
        "clip_grad": 0,
        "seed": seed + 1,
    }
    how |= {"lr_decay_style": "constant", "epp_layouts": folder / "layouts", **row.model}
    how["pipeline_model_parallel_size"] = None
    straight = losses(job(flags(corpus, **how), row.nodes[:1], [], folder / "straight.log"))
    assert len(straight) == ITERATIONS, f"{folder}/straight.log"
    saved = {"save": folder / "saved", "load": folder / "saved", "save_interval": 1}
    at = sorted(random.sample(range(2, ITERATIONS), len(row.nodes) - 1))
    output = job(flags(corpus, **how, **saved), row.nodes, at, folder / "killed.log")
    found = losses(output)
    assert len(found) == ITERATIONS, f"{folder}/killed.log"
    worst = max(abs(found[i] / loss - 1) for i, loss in straight.items())
    ranks = re.findall(r"--epp-layouts .* on (\d+) of (\d+) devices", output)
    return {"worst": worst, "kills": len(at), "ranks": ["/".join(pair) for pair in ranks]}


def losses(output: str) -> dict[int, float]:
    """By iteration, as the last start that came to it printed it."""
    return {int(i): float(x) for i, x in re.findall(r"exact: iteration (\d+) ([-+.e0-9]+)", output)}


def job(words: Sequence[str], nodes: Sequence[int], kills: Sequence[int], log: Path) -> str:
    """Run on ``nodes[0]`` nodes, kill or add nodes when iterations ``kills`` are through."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    most, agents = max(nodes), []
    with log.open("w") as file:
        try:
            for _ in range(nodes[0]):
                agents.append(agent(words, most, port, file))
                until(lambda: listening(port), agents)  # the first keeps the store
            for iteration, count in zip(kills, nodes[1:], strict=False):
                until(lambda at=iteration: max(losses(log.read_text()), default=0) >= at, agents)
                while len(agents) > count:
                    os.killpg(agents.pop().pid, signal.SIGKILL)
                while len(agents) < count:
                    agents.append(agent(words, most, port, file))
            until(lambda: all(one.poll() is not None for one in agents), ())
        finally:
            for one in agents:
                if one.poll() is None:
                    os.killpg(one.pid, signal.SIGKILL)
    assert not any(one.returncode for one in agents), f"{log}: {[a.returncode for a in agents]}"
    return log.read_text()


def agent(words: Sequence[str], most: int, port: int, file) -> subprocess.Popen:
    """Start torchrun for a node of two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{most}"]
    command += ["--nproc-per-node", "2", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", str(port)]
    command += ["--rdzv-conf", "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return subprocess.Popen(
        [*command, PROGRAM, *words], env=env, stdout=file, stderr=file, start_new_session=True
    )


def listening(port: int) -> bool:
    """Return whether a process accepts connections."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(reached, agents: Sequence[subprocess.Popen]) -> None:
    """Wait until ``reached``; an agent that has failed meanwhile ends the row."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not reached():
        assert time.monotonic() < end, "no progress"
        assert not any(one.poll() for one in agents), "torchrun has ended"
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
