"""EPP_ENGINE names the emulation of Transformer Engine's kernels, which the wheel lacks."""

import sys
from pathlib import Path

import pytest

from megatron_epp.mcore.job.job_exit import is_users_mistake
from megatron_epp.mcore.patching import emulated_engine
from tests.engine import start
from tests.programs import ROOT, python

WITHOUT = {"EPP_ENGINE": "", "EPP_ENGINE_DEVICE": "", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"EPP_ENGINE": "tests.engines"}, "EPP_ENGINE=tests.engines: No module named 'tests.engin"),
        ({"EPP_ENGINE": ".engine"}, "EPP_ENGINE=.engine: .*; expected a module that emulates"),
        ({"EPP_ENGINE": "json"}, "EPP_ENGINE=json: a module that emulates nothing; expected tests"),
        (
            {"EPP_ENGINE": "tests.engine", "EPP_ENGINE_DEVICE": "a100"},
            "EPP_ENGINE_DEVICE=a100: expected one of h100, b200",
        ),
    ],
)
def test_what_cannot_be_used_is_one_line(monkeypatch, variables, says) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=says) as refused:
        emulated_engine.start()
    assert is_users_mistake(refused.value) and "\n" not in str(refused.value)


def test_without_transformer_engines_python_the_line_says_how_to_get_it(monkeypatch) -> None:
    monkeypatch.setenv("EPP_ENGINE", "tests.engine")
    monkeypatch.setattr(start, "FOLDER", Path("nowhere"))
    monkeypatch.delitem(sys.modules, "transformer_engine_torch", raising=False)
    with pytest.raises(ValueError, match="no Transformer Engine in nowhere: run bash scripts/set"):
        emulated_engine.start()


def test_the_package_alone_has_no_emulation(tmp_path) -> None:
    """As from a wheel: there is no folder of tests beside it."""
    (tmp_path / "megatron_epp").symlink_to(ROOT / "megatron_epp")
    words = ["certify", "--pp", "1", "--transformer-impl", "transformer_engine"]
    done = python(
        "-m", "megatron_epp", *words, cwd=tmp_path, PYTHONPATH=str(tmp_path), **WITHOUT
    )  # fmt: skip
    assert done.returncode == 2
    assert "layers need a GPU (--device cuda) or a checkout of this project" in done.stderr
    assert (done.stdout + done.stderr).count("\n") == 1


def test_another_package_named_tests_does_not_hide_it(tmp_path) -> None:
    """As a checkout of Megatron-LM has, which comes first on the path."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    program = (
        "import tests; from megatron_epp.mcore.patching import emulated_engine; "
        "print(tests.__file__, emulated_engine._imported('tests.engine').__file__)"
    )
    path = f"{tmp_path}:{ROOT}"
    done = python("-c", program, cwd=tmp_path, PYTHONPATH=path, CUDA_VISIBLE_DEVICES="")
    found = [str(folder / "__init__.py") for folder in (tmp_path / "tests", ROOT / "tests/engine")]
    assert done.stdout.split() == found, done.stderr
