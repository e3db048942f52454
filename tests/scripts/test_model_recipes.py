"""Megatron-LM's example configurations: all are read, a sample is certified."""

from pathlib import Path

import pytest

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

from megatron_epp.certify.degrees import Degrees  # noqa: E402
from megatron_epp.mcore.certify.model_flags import parsed, scaled  # noqa: E402
from tests.programs import loaded  # noqa: E402

pytestmark = pytest.mark.everything

SCRIPT = Path(__file__).parents[2] / "scripts" / "upstream" / "model_recipes.py"
model_recipes = loaded(SCRIPT)
RECIPES = model_recipes.RECIPES
# Experts scaled on their inputs with layers without positions between; windows, sinks, biases and
# YaRN.
SAMPLE = ("llama-4-maverick", "gpt-oss-20b")


@pytest.mark.parametrize("name", RECIPES)
def test_flags_are_read_as_they_stand(name) -> None:
    recipe = RECIPES[name]
    words = recipe.words
    if recipe.layout:
        with pytest.raises(ValueError) as refusal:
            scaled(parsed(words, 2), Degrees(2, 1, 1), overlap=False)
        flags = [word for word in recipe.layout.split() if word.startswith("--")]
        assert all(flag in str(refusal.value) for flag in flags), refusal.value
        assert "\n" not in str(refusal.value)
        words = words + recipe.layout.split()
    made = scaled(parsed(words, 2), Degrees(2, 1, 1), overlap=False)
    # Of a pattern with letters, as many as show its kinds beside one another.
    most = 12 if made.elastic.hybrid_layer_pattern else 4
    assert len(made.layers) == 2 and sum(made.layers) <= most


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_is_certified(name) -> None:
    found = model_recipes.outcome_of(RECIPES[name], pp=2, batches=2)
    assert found.passed, found.said
