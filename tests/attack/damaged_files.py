"""Damaged files of every kind: refused in one line, or read as what they still are."""

import gzip
import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.attack.command_server import CommandServer
from tests.attack.contract import Attack, expect
from tests.attack.jobs import flags
from tests.attack.lines import EITHER, REFUSED, RUNS, Line, judge, run_lines
from tests.attack.material import INDEX_HEAD_BYTES, LENGTHS, Material, write_corpus

SEED = 20260101
FLIPS = 24  # bits of one file, at random
# Good files that belong to the damaged one.
BESIDE = {
    "corpus.idx": ("corpus.bin",),
    "masked_mask.idx": ("masked_mask.bin", "masked.bin", "masked.idx"),
    "masked_mask.bin": ("masked_mask.idx", "masked.bin", "masked.idx"),
}
STATE_FILES = (
    "epp-cost-model.json",
    "epp-cost-model.from-000002.json",
    "epp-default-budgets.json",
    "epp-budget.txt",
    "epp-fallbacks.txt",
)


def attacks(server: CommandServer, material: Material, few: bool = False) -> list[Attack]:
    """``few``: a part of them, for a test."""
    plan, machine = material.plan_words, material.machine_words
    readers: dict[str, Callable[[Path], tuple[str, ...]]] = {
        "good.plan": lambda path: ("check", str(path)),
        "good.step": lambda path: ("simulate", str(path), *machine),
        "good.timed": lambda path: ("draw", str(material("good.plan")), "--records", str(path)),
        "lens.txt": lambda path: (*plan, "--lengths", str(path)),
        "corpus.idx": lambda path: (*plan, "--lengths", str(path)),
        "masked_mask.idx": lambda path: (*plan, "--lengths", str(_masked(path))),
        "masked_mask.bin": lambda path: (*plan, "--lengths", str(_masked(path))),
        "model.json": lambda path: (*plan, "--model", str(path)),
        "device.json": lambda path: (*plan, "--device", str(path)),
        "profile.json": lambda path: (*plan, "--cost-model", str(path), "--layers", "2", "2"),
    }
    if few:
        readers = {name: readers[name] for name in ("good.plan", "corpus.idx")}
    found = [
        Attack(
            "files",
            f"damaged {name}",
            "one line and status 2, or read",
            lambda folder, name=name, reads=reads: run_lines(
                server, list(_damaged(material(name), reads, folder, few)), folder
            ),
        )
        for name, reads in readers.items()
    ]
    if few:
        return found
    return [
        *found,
        Attack(
            "files",
            "one bit of an index's lengths and pointers",
            "refused",
            lambda folder: _flipped_index(server, material, folder),
        ),
        Attack(
            "files",
            "numbers of a profile",
            "one line and status 2, or read",
            lambda folder: run_lines(server, list(_numbers(material, folder)), folder),
        ),
        Attack(
            "files",
            "numbers of a device",
            "one line and status 2, or read",
            lambda folder: run_lines(server, list(_device_numbers(material, folder)), folder),
        ),
        Attack(
            "files",
            "a link where a partial file would be",
            "what it points to is left alone",
            lambda folder: _link_in_the_way(server, material, folder),
        ),
    ]


def _masked(mask: Path) -> Path:
    """The index of the tokens to which a file of their masks belongs."""
    return mask.with_name(mask.name.partition("_mask")[0]).with_suffix(".idx")


def _damaged(
    good: Path, reads: Callable[[Path], tuple[str, ...]], folder: Path, few: bool
) -> Iterator[Line]:
    """The file emptied, cut, flipped, doubled, recoded, nested."""
    drawn = random.Random(f"{SEED} {good.name}")
    data = good.read_bytes()
    yield Line(reads(good), RUNS)
    cases: dict[str, tuple[bytes, str]] = {
        "empty": (b"", REFUSED),
        "blank": (b"\n \n\t\n", REFUSED),
        "nul": (b"\0" * 64, REFUSED),
        "not-text": (bytes(range(256)) * 4, REFUSED),
        "one-byte": (data[:1], EITHER),
        "twice": (data + data, EITHER),
        "backwards": (data[::-1], EITHER),
        "bom": (b"\xef\xbb\xbf" + data, EITHER),
        "crlf": (data.replace(b"\n", b"\r\n"), EITHER),
        "utf-16": (data.decode("latin-1").encode("utf-16"), EITHER),
        "deep": (b"[" * 200_000, REFUSED),
        "long-line": (b"9" * 1_000_000, REFUSED),
        "gz": (gzip.compress(data)[:-9], EITHER),
    }
    for number in range(8):
        cases[f"cut-{number}"] = (data[: drawn.randrange(1, len(data))], EITHER)
    for number in range(FLIPS):
        flipped = bytearray(data)
        flipped[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
        cases[f"flip-{number}"] = (bytes(flipped), EITHER)
    for number in range(FLIPS):  # a number of it is another one
        cases[f"number-{number}"] = (_other_number(data, drawn), EITHER)
    for name, (content, may) in list(cases.items())[:: 5 if few else 1]:
        path = folder / f"{name}-{good.name}{'.gz' * (name == 'gz')}"
        path.write_bytes(content)
        for other in BESIDE.get(good.name, ()):
            shutil.copy(good.with_name(other), path.with_name(f"{name}-{other}"))
        yield Line(reads(path), may)
    yield Line(reads(folder), REFUSED)
    yield Line(reads(folder / f"missing-{good.name}"), REFUSED)
    loop = folder / f"loop-{good.name}"
    loop.symlink_to(loop)
    yield Line(reads(loop), REFUSED)


_OTHER = (b"0", b"-1", b"99999999999999999999", b"1e308", b"nan", b"1.5", b"", b"x", b"Infinity")


def _other_number(data: bytes, drawn: random.Random) -> bytes:
    """``data`` with one run of digits replaced."""
    starts = [
        place
        for place in range(len(data))
        if data[place : place + 1].isdigit() and not data[place - 1 : place].isdigit()
    ]
    if not starts:
        return data[:-1]
    start = stop = drawn.choice(starts)
    while data[stop : stop + 1].isdigit():
        stop += 1
    return data[:start] + drawn.choice(_OTHER) + data[stop:]


def _flipped_index(server: CommandServer, material: Material, folder: Path) -> str:
    """Every eighth bit of what says where documents are."""
    data = material("corpus.idx").read_bytes()
    count = len(LENGTHS)
    assert len(data) == INDEX_HEAD_BYTES + struct.calcsize(f"<{count}i{count}q{count + 1}q")
    stop = INDEX_HEAD_BYTES + 12 * count
    accepted, tried = [], 0
    for bit in range(8 * INDEX_HEAD_BYTES, 8 * stop, 7):
        prefix = folder / f"flip-{bit}"
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        prefix.with_suffix(".idx").write_bytes(flipped)
        shutil.copy(material("corpus.bin"), prefix.with_suffix(".bin"))
        line = Line((*material.plan_words, "--lengths", f"{prefix}.idx"), REFUSED)
        tried += 1
        if (why := judge(line, server.run(line.words, folder=folder))) is not None:
            accepted.append(f"bit {bit % 8} of byte {bit // 8}: {why}")
    expect(not accepted, "\n".join([f"{len(accepted)} of {tried} flipped bits", *accepted[:10]]))
    return f"{tried} flipped bits, all refused"


def _numbers(material: Material, folder: Path) -> Iterator[Line]:
    """Every number of a profile zero, huge or tiny, alone and all together."""
    profile = json.loads(material("profile.json").read_text())
    places = list(_places(profile))
    for value in (0, 1e308, 1e-308, -1, True, "1", None):
        for place in [*places[:: max(1, len(places) // 3)], None]:
            changed = json.loads(json.dumps(profile))
            for each in places if place is None else [place]:
                if each[-1] != "profile":
                    _put(changed, each, value)
            path = folder / f"{value}-{'all' if place is None else '-'.join(map(str, place))}.json"
            path.write_text(json.dumps(changed))
            cost = ("--cost-model", str(path), "--layers", "2", "2")
            batch = ("--lengths", str(material("lens.txt")), "--memory-budget-gib", "1")
            yield Line(("plan", *batch, *cost, "--pp", "2", "--context", "1024"))
            yield Line(("simulate", str(material("good.plan")), *cost, *batch[2:]))


def _device_numbers(material: Material, folder: Path) -> Iterator[Line]:
    device = json.loads(material("device.json").read_text())
    refused: list[dict] = [
        {"budget_gib": True},
        {"budget_gib": 1e308},
        {"node_devices": 0.5},
        {"node_devices": 0},
        {"group_bytes_per_second": {"0": 1e9}},
        {"group_bytes_per_second": {"-4": 1e9}},
        {"group_bytes_per_second": {"2.5": 1e9}},
        {"group_bytes_per_second": []},
        {"linear_flops": "fast"},
        {"linear_flops": -1},
        {"name": ""},
        {"nope": 1},
    ]
    odd = [{key: value} for key in device for value in (1e-300, 1e300, 0) if key != "name"]
    for number, (changes, may) in enumerate(
        [*((c, REFUSED) for c in refused), *((c, EITHER) for c in odd)]
    ):
        path = folder / f"device-{number}.json"
        path.write_text(json.dumps({**device, **changes}))
        yield Line((*material.plan_words, "--device", str(path)), may)


def _places(value: object, before: tuple = ()) -> Iterator[tuple]:
    """Where numbers stand in a value of JSON."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _places(inner, (*before, key))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _places(inner, (*before, place))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield before


def _put(value: object, place: Sequence, new: object) -> None:
    for key in place[:-1]:
        value = value[key]
    value[place[-1]] = new


def _link_in_the_way(server: CommandServer, material: Material, folder: Path) -> str:
    victim = folder / "victim"
    victim.write_text("precious")
    for name in ("o.txt", "o.svg"):
        (folder / f".{name}.partial").symlink_to(victim)
        words = ("draw", str(material("good.plan")), "-o", name)
        ended = server.run(words, folder=folder)
        expect(ended.status in (0, 2), f"exit status {ended.status}: {ended.err}")
        expect(victim.read_text() == "precious", f"draw -o {name} wrote through the link")
        expect(not (folder / name).is_symlink(), f"{name} is a link to the victim")
    return "left alone"


# ------------------------------------------------------------------ beside a checkpoint


def state_attacks(server: CommandServer, material: Material) -> list[Attack]:
    """Files that training keeps beside its checkpoints; ``server`` has torch."""
    return [
        Attack(
            "files",
            "damaged state files, on resume",
            "one line that names the file, or it trains",
            lambda folder: _damaged_state(server, material, folder),
        )
    ]


def _damaged_state(server: CommandServer, material: Material, folder: Path) -> str:
    save = folder / "save"
    corpus = write_corpus(folder / "documents", [30, 129, 64, 17, 90, 33, 48, 101] * 2)
    # As many iterations in all of them: Megatron's scheduler refuses to resume with another number.
    one = {"pipeline_model_parallel_size": 1, "save_interval": 2, "train_iters": 4}
    where = {"folder": folder, "entry": "pretrain", "seconds": 180}
    ended = server.run(flags(corpus, save=save, **one), **where)
    expect(ended.status == 0, f"a good job ended with {ended.status}: {ended.lines[-1:]}")
    shutil.rmtree(save / "iter_0000004")
    (save / "latest_checkpointed_iteration.txt").write_text("2")
    for name in STATE_FILES[:2]:  # as a job that measures keeps them
        shutil.copy(material("profile.json"), save / name)
    one["epp_cost_model"] = None
    wrong, said, tried = [], 0, 0
    for name in STATE_FILES:
        whole = (save / name).read_bytes() if (save / name).exists() else b"stages 1\nx y z\n[1, 2"
        for damage, content in {
            "cut": whole[: len(whole) // 2],
            "empty": b"",
            "garbage": bytes(range(256)),
        }.items():
            copied = folder / f"{name}-{damage}"
            shutil.copytree(save, copied)
            (copied / name).write_bytes(content)
            words = flags(corpus, save=copied, load=copied, **one)
            line = Line(tuple(words), EITHER, entry="pretrain", seconds=180)
            ended = server.run(line.words, **where)
            tried += 1
            said += ended.status == 2
            why = judge(line, ended)
            if why is None and ended.status == 2 and name not in ended.err:
                why = f"the line does not name the file: {ended.lines[0]}"
            if why is not None:
                wrong.append(f"{damage} {name}: {why}")
            shutil.rmtree(copied)
    expect(not wrong, "\n".join([f"{len(wrong)} of {tried} damages", *wrong]))
    return f"{tried} damages: {said} refused by name, {tried - said} trained"
