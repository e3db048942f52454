"""scripts/upstream/integrations.py, on what pip has installed: a package that the test makes."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "upstream"))

import integrations

PACKS = """
def get_packed_seq_params(position_ids):
    position_ids = position_ids.flatten()
    starts = (position_ids == {start}).nonzero().flatten().int()
    end = torch.tensor([len(position_ids)]).int()
    return {{"cu_seq_lens_q": torch.cat([starts, end])}}
"""


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """``said(source of the packing code, words)``: status and output of the script where a package
    ms-swift 9.9 with that source is installed."""

    def run(source: str | None, *words: str) -> tuple[object, str]:
        if source is not None:
            facts, code = tmp_path / "ms_swift-9.9.dist-info", tmp_path / "swift" / "utils"
            facts.mkdir()
            (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: ms-swift\nVersion: 9.9\n")
            code.mkdir(parents=True)
            (code / "transformers_utils.py").write_text(source)
            monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(sys, "argv", ["integrations.py", "--framework", "ms-swift", *words])
        try:
            status: object = integrations.main()
        except SystemExit as end:
            status = end.code
        heard = capsys.readouterr()
        return status, heard.out + heard.err

    return run


def test_what_pip_installed_is_compared(said) -> None:
    status, text = said(PACKS.format(start=0))
    assert (status, text) == (
        0,
        "ms-swift 9.9: 420 of 420 micro-batches as its own code packs\n",
    )


def test_a_release_that_packs_otherwise_is_told(said) -> None:
    status, text = said(PACKS.format(start=1))
    assert status == 1 and "tp 1, cp 1, case 0: documents differ" in text
    assert "Traceback" not in text


def test_a_release_with_other_helpers_ends_in_one_line(said) -> None:
    status, text = said("def get_packed_seq_params(places): return _helper(places)")
    assert status == 2 and text.count("\n") == 1
    assert "NameError: name '_helper' is not defined; its packing code has moved" in text


def test_nothing_installed_ends_in_one_line(said, tmp_path) -> None:
    status, text = said(None)
    assert status == 2 and text.startswith("integrations.py: error: ms-swift: pip has installed n")
    status, text = said(None, "--checkout", str(tmp_path))
    assert status == 2 and "holds no swift/utils/transformers_utils.py" in text
