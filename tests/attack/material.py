"""Good input, small: what attacks damage, and what they put odd words next to."""

import json
from dataclasses import asdict
from pathlib import Path

from megatron_epp.cost.analytic import profile
from megatron_epp.cost.catalogue.devices import Device
from megatron_epp.cost.catalogue.models import Model
from tests.attack.commands import run
from tests.corpus.test_idx_file import write_pair
from tests.corpus.test_loss_mask import masked_corpus

LENGTHS = (900, 40, 37, 12, 300, 5, 61, 8)  # tokens that are inputs, of documents
MODEL = Model("tiny", 4, 64, 256, 4, 2, 16, 128)
DEVICE = Device(
    name="small",
    budget_gib=1,
    linear_flops=1e11,
    attention_flops=1e11,
    launch_seconds=1e-5,
    group_bytes_per_second={2: 1e9, 4: 1e9, 8: 1e9},
    link_bytes_per_second=1e9,
    link_latency_seconds=1e-5,
    node_devices=8,
)


class Material:
    """Files in ``folder``: lens.txt corpus.bin corpus.idx model.json device.json profile.json
    good.plan good.step good.timed, and a corpus ``masked`` with its loss masks."""

    def __init__(self, folder: Path):
        self.folder = folder
        self("lens.txt").write_text("".join(f"{length}\n" for length in LENGTHS))
        write_pair(self("corpus"), [length + 1 for length in LENGTHS])
        # Of every document the second half is targets.
        halves = [((length + 1) // 2, (length + 2) // 2) for length in LENGTHS]
        masked_corpus(self("masked"), [[0] * none + [1] * targets for none, targets in halves])
        self("model.json").write_text(json.dumps(asdict(MODEL)))
        self("device.json").write_text(json.dumps(asdict(DEVICE)))
        profile(MODEL, DEVICE).save(str(self("profile.json")))
        for replicas, name in ((1, "good.plan"), (2, "good.step")):
            whole = ("--vocab-parallel", "off")
            self._make(*self.plan_words, *whole, "--dp", replicas, "-o", self(name))
        timed = ("-o", self("good.timed"))
        self._make("simulate", self("good.plan"), *self.machine_words, *timed)

    def __call__(self, name: str) -> Path:
        return self.folder / name

    @staticmethod
    def _make(*words: object) -> None:
        ended = run([*map(str, words)])
        if ended.status != 0:
            raise RuntimeError(f"a good command line failed: {words}: {ended.err}")

    @property
    def machine_words(self) -> tuple[str, ...]:
        return "--model", str(self("model.json")), "--device", str(self("device.json"))

    @property
    def plan_words(self) -> tuple[str, ...]:
        batch = ("--lengths", str(self("lens.txt")), "--context", "1024", "--effort", "0")
        return ("plan", *batch, *self.machine_words, "--pp", "2")
