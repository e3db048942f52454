"""Public measurements of training and its parts, and the analytic model's errors on them.

``public_measurements.json`` contains the measurements, table by table, as their authors published
them. ``public_scores.json`` contains the analytic model's prediction of each measurement
(``public.py`` writes it). Two properties of a row follow from rules that were fixed
before any constant of the model was fitted:

comparable   bf16, kernels of 2024 or later, a device of the catalogue; communication inside a layer
             does not overlap computation (communication between replicas may)
held out     every third row of each table, starting with the second: no constant is fitted to it
"""

import json
import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from headline import ROOT

sys.path.insert(0, str(ROOT))

from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.catalogue.models import MODELS, Model

KERNELS = 2024
# Names of measured values; larger rates are faster.
SECONDS, RATES, BYTES = "seconds", ("tflops", "tokens_per_second", "bus_gb_per_second"), "gib"
GIB_OF_GB = 1e9 / 2**30
_FOLDER = Path(__file__).parent
_MEASUREMENTS, SCORES = _FOLDER / "public_measurements.json", _FOLDER / "public_scores.json"


Scores = dict[str, dict[str, float]]  # predicted numbers by the key of a row


@dataclass(frozen=True, slots=True)
class PublicRow:
    """Row of a public table.

    Attributes:
        table: name of the table.
        source: publication of the table.
        number: index of the row in its table.
        facts: fields of the row and of its table: what was measured, and on what.
    """

    table: str
    source: str
    number: int
    facts: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Key of the row in the file of scores."""
        return f"{self.table} {self.number + 1}"

    @property
    def what(self) -> str:
        """What was measured: step, slices, layer, gather, product, experts or attention."""
        return self.facts["what"]

    @property
    def held_out(self) -> bool:
        """Whether no constant may be fitted to the row."""
        return self.number % 3 == 1

    @property
    def comparable(self) -> bool:
        """Whether the row is comparable with predictions, by the rule in the module's docstring."""
        facts = self.facts
        return (
            facts["precision"] == "bf16"
            and facts["kernels"] >= KERNELS
            and facts["hidden"] == "no"
            and facts["device"] in DEVICES
        )

    @property
    def measured(self) -> dict[str, float]:
        """Measured numbers by name; memory is in GiB."""
        values = {name: self.facts[name] for name in (SECONDS, *RATES, BYTES) if name in self.facts}
        if "gb" in self.facts:
            values[BYTES] = round(self.facts["gb"] * GIB_OF_GB, 2)
        for stage, gib in enumerate(self.facts.get("stage_gib", ())):
            values[f"{BYTES} {stage}"] = gib
        return values

    @property
    def model(self) -> Model | None:
        """Model that was measured; None if the row is not of a model, such as a gather."""
        name = self.facts.get("model")
        return None if name is None else _models()[name]

    @property
    def own(self) -> bool:
        """Whether this project measured the row."""
        return self.source.startswith("scripts/")

    @property
    def kind(self) -> str:
        """Either "dense" or "MoE" for steps and layers of models, otherwise what was measured."""
        model = self.model
        if model is None or self.what == "slices":
            return self.what
        return "MoE" if model.most_experts else "dense"


@cache
def _file() -> dict[str, Any]:
    return json.loads(_MEASUREMENTS.read_text(encoding="utf-8"))


@cache
def _models() -> dict[str, Model]:
    return {**MODELS, **{each["name"]: Model(**each) for each in _file()["models"]}}


@cache
def measurements() -> tuple[PublicRow, ...]:
    """Return all rows of all tables."""
    return tuple(
        PublicRow(table["table"], table["source"], number, {**table["common"], **row})
        for table in _file()["tables"]
        for number, row in enumerate(table["rows"])
    )


@cache
def scores() -> Scores:
    """Return the analytic model's predictions for each row, by the row's key."""
    return json.loads(SCORES.read_text(encoding="utf-8"))


def error(name: str, measured: float, predicted: float) -> float:
    """Return how much longer or larger ``predicted`` is than ``measured``, as a fraction.

    ``name`` is the name of the measured number. Rates are inverted before they are compared.
    """
    ratio = measured / predicted if name in RATES else predicted / measured
    return ratio - 1


def errors_of(rows: Iterable[PublicRow], scores: Scores, *, memory: bool = False) -> list[float]:
    """Return the errors of the predicted seconds of ``rows``, or of their bytes if ``memory``."""
    values = []
    for row in rows:
        predicted = scores[row.key]
        values += [
            error(name, measured, predicted[name])
            for name, measured in row.measured.items()
            if name in predicted and name.startswith(BYTES) == memory
        ]
    return values


def median_and_worst(values: Iterable[float]) -> tuple[float, float]:
    """Return the median and the maximum of the absolute errors."""
    sizes = [abs(each) for each in values]
    return statistics.median(sizes), max(sizes)
