"""Random plans in the trainer's executor: none may hang, each has the plain model's loss."""

import re
from collections.abc import Sequence
from pathlib import Path

from tests.attack.command_server import CommandServer
from tests.attack.contract import Attack, GaveWay, expect

SILENCE_SECONDS = 90  # of a process, before it counts as hung
SECONDS = 1800.0
_MODEL = "--hidden-size 64 --num-attention-heads 4 --swiglu --normalization RMSNorm"
_CERTIFIED = re.compile(r"certified: (\d+) batches, worst error (\S+) ")


def attacks(server: CommandServer, plans: int) -> list[Attack]:
    """Half of the ``plans`` on two ranks, half on four."""
    half = max(1, plans // 2)
    layouts = {
        f"{half} on two stages": ("--pp", "2", "--num-layers", "4"),
        f"{half} on four ranks, pp 4": ("--pp", "4", "--num-layers", "4"),
    }
    return [
        Attack(
            "plans",
            name,
            "no hang, the plain model's numbers to 1e-12",
            lambda folder, words=words: certify(server, half, words, folder),
        )
        for name, words in layouts.items()
    ]


def certify(server: CommandServer, plans: int, layout: Sequence[str], folder: Path) -> str:
    words = ("certify", *layout, *_MODEL.split(), "--batches", str(plans), "--seed", "4242")
    cache = folder.with_name(f"{folder.name}-torch")  # torch makes it when dynamo is imported
    ended = server.run(
        (*words, "--timeout", str(SILENCE_SECONDS)),
        folder=folder,
        environment={"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        seconds=SECONDS,
    )
    said = " / ".join(ended.out.splitlines()[-3:])[-300:]
    if ended.status is None:
        raise GaveWay(f"still running after {SECONDS:.0f} s: {said}")
    expect(ended.status == 0, f"exit status {ended.status}: {said} {' '.join(ended.lines[-2:])}")
    found = _CERTIFIED.search(ended.out)
    expect(found is not None and int(found[1]) == plans, f"not certified: {said}")
    expect(not ended.left, f"left running: {[words[-80:] for words in ended.left]}")
    expect(not list(folder.iterdir()), f"left behind: {[path.name for path in folder.iterdir()]}")
    return f"{plans} plans, worst error {found[2]}"
