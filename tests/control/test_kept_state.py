"""What a run keeps beside its checkpoint: damaged, it is refused in a line that names the cure."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_epp.control.cost_monitor import CostMonitor
from megatron_epp.cost.analytic import profile
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.cost.profile import Profile

TEXT = Profile.from_json(
    profile(Model("m", 4, 32, 64, 4, 2, 8, 128), DEVICES["cpu"]).to_json()
).to_json()  # in the order of the reader


def test_a_cut_refit_names_the_way_out(tmp_path) -> None:
    path = tmp_path / "epp-cost-model.from-000009.json"
    path.write_text(TEXT[: len(TEXT) // 2])
    monitor = CostMonitor(SimpleNamespace(), [], may_refit=True)
    with pytest.raises(ValueError, match=f"{path.name}: no JSON .*; delete .*{path.name}: the run"):
        monitor._kept(str(tmp_path))
    path.write_text(TEXT)
    assert monitor._kept(str(tmp_path)) == {9: TEXT}


def test_a_copy_that_cannot_be_made_ends_nothing(tmp_path, caplog) -> None:
    (tmp_path / "epp-cost-model.from-000009.json").write_text(TEXT)
    (tmp_path / "file").write_text("")
    monitor = CostMonitor(SimpleNamespace(), [str(tmp_path / "file")], may_refit=True)
    assert monitor._kept(str(tmp_path)) == {9: TEXT}
    (record,) = caplog.records
    assert "an earlier refit" in record.getMessage()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1, 2", "Expecting"),
        ("", "Expecting"),
        ("{}", "a list of bytes by rank"),
        ('[1, "x"]', "a list of bytes by rank"),
        ("[1, 0]", "a list of bytes by rank"),
        ("[1, NaN]", "a list of bytes by rank"),
        ("[1e999, 1]", "a list of bytes by rank"),
        ("[" * 100_000, "recursion"),
        ("\xff\x00", "Expecting"),
    ],
)
def test_damaged_default_budgets_name_the_way_out(tmp_path, text, says) -> None:
    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()
    from megatron_epp.mcore.job.job_cost import DEFAULT_BUDGETS, saved_budgets

    (tmp_path / DEFAULT_BUDGETS).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=rf"{DEFAULT_BUDGETS}: no memory budgets \(.*{says}") as no:
        saved_budgets(SimpleNamespace(load=str(tmp_path)), 2)
    assert "; delete the file: " in str(no.value)
    (tmp_path / DEFAULT_BUDGETS).write_text("[3.5, 4]")
    assert saved_budgets(SimpleNamespace(load=str(tmp_path)), 2) == (3.5, 4)
    assert saved_budgets(SimpleNamespace(load=str(tmp_path)), 3) is None
    assert saved_budgets(SimpleNamespace(load=str(Path(tmp_path) / "no")), 2) is None
