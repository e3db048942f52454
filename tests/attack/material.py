"""Good input, small: what attacks damage, and what they put odd words beside."""

import json
import random
import struct
from collections.abc import Sequence
from pathlib import Path

from tests.attack.command_server import CommandServer

LENGTHS = (900, 40, 37, 12, 300, 5, 61, 8)  # inputs of documents
MODEL = {
    "name": "tiny",
    "layers": 4,
    "hidden": 64,
    "ffn_hidden": 256,
    "heads": 4,
    "kv_heads": 2,
    "head_size": 16,
    "vocabulary": 128,
}
DEVICE = {
    "name": "small",
    "budget_gib": 1,
    "linear_flops": 1e11,
    "attention_flops": 1e11,
    "launch_seconds": 1e-5,
    "group_bytes_per_second": {"2": 1e9, "4": 1e9, "8": 1e9},
    "link_bytes_per_second": 1e9,
    "link_latency_seconds": 1e-5,
    "node_devices": 8,
}
_UINT8, _UINT16 = 1, 8  # in a Megatron index
INDEX_HEAD_BYTES = 34


def write_corpus(prefix: Path, tokens: Sequence[int], vocabulary: int = 127, seed: int = 0) -> Path:
    """A Megatron corpus of documents of so many ``tokens``, drawn at random; returns ``prefix``."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    drawn = random.Random(seed)
    words = [drawn.randrange(vocabulary) for _ in range(sum(tokens))]
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(words)}H", *words))
    Path(f"{prefix}.idx").write_bytes(index(tokens))
    return prefix


def write_masks(prefix: Path, tokens: Sequence[int]) -> None:
    """Beside the corpus ``prefix``: of every document the second half is targets."""
    masks = b"".join(bytes(count // 2) + b"\1" * (count - count // 2) for count in tokens)
    Path(f"{prefix}_mask.bin").write_bytes(masks)
    Path(f"{prefix}_mask.idx").write_bytes(index(tokens, _UINT8))


def index(tokens: Sequence[int], dtype: int = _UINT16) -> bytes:
    count, size = len(tokens), {_UINT8: 1, _UINT16: 2}[dtype]
    starts = [size * sum(tokens[:number]) for number in range(count)]
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, dtype, count, count + 1)
    assert len(head) == INDEX_HEAD_BYTES
    return head + struct.pack(f"<{count}i{count}q{count + 1}q", *tokens, *starts, *range(count + 1))


class Material:
    """Files in ``folder``: lens.txt corpus.bin corpus.idx model.json device.json profile.json
    good.plan good.step good.timed, and a corpus ``masked`` with its loss masks."""

    def __init__(self, folder: Path, server: CommandServer):
        from megatron_epp.cost.analytic import profile
        from megatron_epp.cost.catalogue.devices import Device
        from megatron_epp.cost.catalogue.models import Model

        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self("lens.txt").write_text("".join(f"{length}\n" for length in LENGTHS))
        write_corpus(self("corpus"), [length + 1 for length in LENGTHS])
        write_corpus(self("masked"), [length + 1 for length in LENGTHS])
        write_masks(self("masked"), [length + 1 for length in LENGTHS])
        self("model.json").write_text(json.dumps(MODEL))
        self("device.json").write_text(json.dumps(DEVICE))
        profile(Model(**MODEL), Device(**DEVICE)).save(str(self("profile.json")))
        for replicas, name in ((1, "good.plan"), (2, "good.step")):
            whole = ("--vocab-parallel", "off")  # torch's CSV knows no H and G
            self._make(server, *self.plan_words, *whole, "--dp", replicas, "-o", self(name))
        timed = ("-o", self("good.timed"))
        self._make(server, "simulate", self("good.plan"), *self.machine_words, *timed)

    def __call__(self, name: str) -> Path:
        return self.folder / name

    @staticmethod
    def _make(server: CommandServer, *words: object) -> None:
        ended = server.run([*map(str, words)])
        if ended.status != 0:
            raise RuntimeError(f"a good command line failed: {words}: {ended.err}")

    @property
    def machine_words(self) -> tuple[str, ...]:
        return "--model", str(self("model.json")), "--device", str(self("device.json"))

    @property
    def plan_words(self) -> tuple[str, ...]:
        batch = ("--lengths", str(self("lens.txt")), "--context", "1024", "--effort", "0")
        return ("plan", *batch, *self.machine_words, "--pp", "2")
