"""Facts of published models, as keys of the config.json of transformers: hub_models.json.

Each was written down from what its makers publish: the model's card, its report, and the sizes of
its repository, which ``source`` names. Keys that transformers' class has as defaults are left out
here and there on purpose: a file may.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple


class Published(NamedTuple):
    """A model: where its facts are published, and the keys."""

    source: str
    keys: dict[str, Any]


HUB_MODELS = {
    name: Published(**facts)
    for name, facts in json.loads(Path(__file__).with_suffix(".json").read_text()).items()
}
