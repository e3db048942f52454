"""Two hosts with a link between them, and what becomes of a training when the link is cut.

    namespace a   eth 10.213.7.1  ---- veth ----  10.213.7.2 eth   namespace b
    torchrun, rank 0, stage 0                     torchrun, rank 1, stage 1

Namespaces of the network have interfaces, addresses and sockets of their own: rendezvous, gloo and
Megatron find each other as on two machines. A link that is down drops packets without a word, as a
pulled cable does: nobody's connection is reset.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.mcore.runs import ROOT, flags, write_corpus
from tests.waiting import LAST_RESORT_SECONDS, until

pytestmark = pytest.mark.everything

ADDRESS = {"a": "10.213.7.1", "b": "10.213.7.2"}
INTERFACE = "epplink"
# Of the job's groups: what is tested. Ranks have imported before it counts, and wait 3 s for their
# first plan on a quiet machine, where the planner's loops are compiled already (COMPILE).
TIMEOUT_SECONDS = 60
COMPILE = (
    "-m megatron_epp compare --lengths wlb --model gpt-7b --device a100-80g --pp 4 --cp 8"
    " --context 65536 --global-batch-size 16 --batches 1 --levers all"
)


def ip(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *words], capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Two namespaces by the names of their hosts, with the link up."""
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2 to make two hosts")
    names = {host: f"epp-{os.getpid()}-{host}" for host in ADDRESS}
    made: list[str] = []
    try:
        for name in names.values():
            done = ip("netns", "add", name)
            if done.returncode:
                pytest.skip(f"network namespaces are not allowed here: {done.stderr.strip()}")
            made.append(name)
        a, b = names.values()
        link = ("link", "add", INTERFACE, "netns", a, "type", "veth")
        done = ip(*link, "peer", "name", INTERFACE, "netns", b)
        if done.returncode:
            pytest.skip(f"virtual links are not allowed here: {done.stderr.strip()}")
        for host, name in names.items():
            for words in (
                ("address", "add", f"{ADDRESS[host]}/24", "dev", INTERFACE),
                ("link", "set", INTERFACE, "up"),
                ("link", "set", "lo", "up"),
            ):
                done = ip("-n", name, *words)
                assert done.returncode == 0, done.stderr
        yield names
    finally:
        for name in made:
            for process in ip("netns", "pids", name).stdout.split():
                with suppress(ProcessLookupError):  # torchrun's workers outlive it when killed
                    os.kill(int(process), signal.SIGKILL)
            ip("netns", "delete", name)


def start(host: str, namespace: str, words: list[str], log: Path) -> subprocess.Popen:
    """torchrun on ``host``, its rendezvous on host a; both outputs in ``log``."""
    node = list(ADDRESS).index(host)
    torchrun = [
        *("-m", "torch.distributed.run"),
        *("--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node)),
        *("--rdzv-backend", "c10d", "--rdzv-id", "rehearsal"),
        *("--rdzv-endpoint", f"{ADDRESS['a']}:29477", "--local-addr", ADDRESS[host]),
        # Who keeps the store is asked by host name, which these hosts have not.
        *("--rdzv-conf", f"is_host={int(host == 'a')},join_timeout={LAST_RESORT_SECONDS:.0f}"),
        *("-m", "tests.rehearsal.impatient", str(TIMEOUT_SECONDS), str(log.parent)),
    ]
    with open(log, "w") as output:
        return subprocess.Popen(
            [*f"ip netns exec {namespace}".split(), sys.executable, *torchrun, *words],
            cwd=ROOT,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "CUDA_VISIBLE_DEVICES": "",
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def lives(process: psutil.Process) -> bool:
    """Whether it has not ended; its torchrun may be too busy with a lost store to notice."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_ranks_on_two_hosts_train_and_end_when_the_link_is_cut(hosts, tmp_path) -> None:
    subprocess.run(
        [sys.executable, *COMPILE.split()], cwd=ROOT, stdout=subprocess.DEVNULL, check=True
    )
    words = flags(
        write_corpus(tmp_path / "corpus", [90, 20, 40, 128, 9, 60] * 20),
        epp=True,
        epp_plan_ahead=True,
        train_iters=100000,
    )
    logs = {host: tmp_path / f"{host}.log" for host in hosts}
    running = {host: start(host, name, words, logs[host]) for host, name in hosts.items()}

    def told(host: str) -> str:
        return logs[host].read_text(errors="replace")

    def ended() -> list[int]:
        return [p.returncode for p in running.values() if p.poll() is not None]

    until(lambda: (tmp_path / "here").exists() or ended(), lambda: "\n".join(map(told, hosts)))
    assert not ended(), (ended(), *map(told, hosts))
    done = ip("-n", hosts["a"], "link", "set", INTERFACE, "down")
    assert done.returncode == 0, done.stderr
    (tmp_path / "cut").touch()
    ranks = [child for job in running.values() for child in psutil.Process(job.pid).children()]
    assert len(ranks) == 2, ranks
    until(lambda: not any(map(lives, ranks)), lambda: "\n".join(map(told, hosts)))
    # torchrun itself has its own patience with the store that host a keeps: b's may take a minute.
    assert running["a"].wait(LAST_RESORT_SECONDS) != 0, told("a")
    for rank, host in enumerate(hosts):
        # Which op or transfer of which iteration this rank stood in, and for how long.
        waited = (
            rf"pipeline rank {rank}, stage {rank}, iteration \d+: waited for \S+ for (\d+)\.\d s"
        )
        seconds = [int(found) for found in re.findall(waited, told(host))]
        assert seconds and max(seconds) >= TIMEOUT_SECONDS, told(host)
        assert "Traceback" not in told(host) or "link is lost" in told(host), told(host)
    # And for whom: the watcher's last word.
    last = r"rank 1 does not move: pipeline rank 1, .*: stage 0 \(rank 0\) has not sent what F of"
    assert re.search(last, told("b")), told("b")
