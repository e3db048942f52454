"""Restarts on other numbers of devices: --epp-layouts."""

import json
import re
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_epp.mcore.choose import layouts, start
from megatron_epp.mcore.choose.kept import CHOICES_FILE, TRACKER
from megatron_epp.mcore.choose.layouts import AllowedLayout, ChosenLayout, choice, read_layouts
from megatron_epp.mcore.flags.config import LAYOUT_KEY
from megatron_epp.mcore.job.read_flags import prepare_parser
from tests.mcore.runs import DOUBLE, Run, exact_losses, flags, train, trained

pytestmark = pytest.mark.everything

# ------------------------------------------------------------------ the file


def written(folder: Path, text: str) -> str:
    (folder / "layouts").write_text(text)
    return str(folder / "layouts")


def test_a_file_of_layouts(tmp_path) -> None:
    path = written(tmp_path, "# fastest first\n\ntp 2 pp 2 layers 3 5\n ep 4 cp 2 # experts\n")
    first, second = read_layouts(path)
    assert first == AllowedLayout(2, 2, layers=(3, 5), line=3)
    assert second == AllowedLayout(cp=2, ep=4, line=4)
    assert str(first) == "tp 2 pp 2 cp 1 ep 1 layers 3 5"
    assert (first.least_ranks(None), second.least_ranks(1), second.least_ranks(None)) == (4, 4, 4)
    assert AllowedLayout(tp=2, ep=4).least_ranks(None) == 8  # experts cut as the rest is


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pp 2\npp two\n", ":2: pp 'two': expected a number from 1 on"),
        ("pp", ":1: pp '': expected a number from 1 on"),
        ("pp 0", ":1: pp '0'"),
        ("dp 2", ":1: 'dp': expected each of tp, pp, cp, ep once, layers"),
        ("pp 2 pp 4", ":1: 'pp': expected each of"),
        ("pp 3 layers 2 2", ":1: layers of 2 stages; expected those of pp 3"),
        ("# none\n", ": 0 layouts; expected 1 to 256, one a line"),
    ],
)
def test_a_line_that_is_none(tmp_path, text, said) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=re.escape(f"--epp-layouts {path}{said}")):
        read_layouts(path)


@pytest.mark.parametrize(
    ("contents", "said"), [(None, "No such file or directory"), (b"\xff\xfe", "is not UTF-8 text")]
)
def test_a_file_that_cannot_be_read(tmp_path, contents, said) -> None:
    path = tmp_path / "layouts"
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(ValueError, match=f"--epp-layouts {path}: {said}.*; expected a file"):
        read_layouts(str(path))


def test_a_start_without_layouts_reads_nothing(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt", "--epp", "--epp-layout", "x"])
    monkeypatch.setitem(sys.modules, "megatron.training.arguments", None)  # an import would fail
    assert start.choose_allowed_layout() is None


def test_layouts_are_no_longer_searched(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"auto is no longer searched; .* tune --gpus N --lengths"):
        read_layouts("auto")
    from megatron.training.arguments import parse_args

    for flag in ("--epp-search-ahead", "--no-epp-search-ahead"):
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt", flag])
        with pytest.raises(ValueError, match=rf"{flag} was removed; leave it out; layouts"):
            parse_args(prepare_parser)


# ------------------------------------------------------------------ the choice


def chosen(monkeypatch, folder: Path, text: str, devices: int, **how: object) -> ChosenLayout:
    """The choice where a layout takes as many seconds as its pipeline has stages; 9 do not fit."""
    monkeypatch.setattr(layouts, "validated_with", lambda wanted, layout, ranks: wanted)
    wanted = Namespace(
        epp_layouts=written(folder, text), expert_tensor_parallel_size=1, load=None, finetune=False,
        no_load_optim=None, **how,
    )  # fmt: skip
    return choice(wanted, devices, lambda args, layout: None if layout.pp == 9 else layout.pp)


def test_most_devices_and_then_the_fastest(monkeypatch, tmp_path) -> None:
    def found(text: str, devices: int) -> tuple[int, int]:
        one = chosen(monkeypatch, tmp_path, text, devices)
        return one.layout.pp, one.ranks

    assert found("pp 4\npp 2\npp 3", 12) == (2, 12)
    assert found("pp 4\npp 3", 11) == (3, 9)
    assert found("pp 9\npp 4", 9) == (4, 8)  # where the larger one does not fit
    one = chosen(monkeypatch, tmp_path, "pp 3", 4)
    assert one.has_spares and one.line("f").endswith("spares: ranks 3")
    assert ChosenLayout.of_facts(one.facts) == one
    with pytest.raises(ValueError, match="fits the 1 devices that are there; expected at least 2"):
        chosen(monkeypatch, tmp_path, "pp 3\npp 2", 1)
    with pytest.raises(ValueError, match=r"no layout fits 9 devices.*more memory than there is"):
        chosen(monkeypatch, tmp_path, "pp 9", 9)


def test_another_ep_keeps_no_optimizer(monkeypatch, tmp_path) -> None:
    (tmp_path / TRACKER).write_text("2")
    (tmp_path / CHOICES_FILE).write_text(json.dumps({LAYOUT_KEY: {"ep": 2}}))
    monkeypatch.setattr(layouts, "validated_with", lambda wanted, layout, ranks: wanted)
    wanted = {"epp_layouts": written(tmp_path, "ep 4\nep 2"), "expert_tensor_parallel_size": 1}
    wanted |= {"load": str(tmp_path), "finetune": False}
    for no_optimizer, expected in ((None, 2), (True, 4)):
        args = Namespace(**wanted, no_load_optim=no_optimizer)
        found = choice(args, 4, lambda args, layout: 1 / layout.ep)
        assert found.layout.ep == expected


# ------------------------------------------------------------------ restarts


def test_four_devices_then_two_then_four(corpus, tmp_path) -> None:
    """Losses of an undisturbed run: the same bits with the same layout, and 1e-12 with another."""
    how = {"epp": True, "global_batch_size": 5, "train_iters": 4, "clip_grad": 0}
    how |= {"lr_decay_style": "constant", "save": tmp_path}

    def run(devices: int, text: str, **more: object) -> Run:
        path = written(tmp_path, text)
        return trained(flags(corpus, **{**how, **more}, epp_layouts=path), devices, DOUBLE)

    straight = run(4, "pp 2\npp 4", save_interval=2)
    assert len(exact_losses(straight)) == 4
    assert "tp 1 pp 2 cp 1 ep 1 on 4 of 4 devices, predicted " in straight.output
    for file in tmp_path.glob("latest*"):
        file.write_text("2")
    back = {"load": tmp_path, "save": None}
    same = run(4, "pp 2", **back)
    assert exact_losses(same) == exact_losses(straight)[2:]
    two = run(2, "pp 1\npp 2 layers 1 3", **back)
    assert exact_losses(two) == pytest.approx(exact_losses(straight)[2:], rel=1e-12)
    with_spare = run(4, "pp 3", epp_placement=None, **back)
    assert exact_losses(with_spare) == pytest.approx(exact_losses(straight)[2:], rel=1e-12)
    assert "waits as a spare: tp 1 pp 3 cp 1 ep 1 has no place" in with_spare.output
    assert "chosen anew, as the checkpoint's run had another layout" in with_spare.output


def test_a_layout_that_the_model_does_not_have(corpus, tmp_path) -> None:
    path = written(tmp_path, "pp 2\ntp 3\n")
    words = flags(corpus, epp=True, epp_layouts=path, save=tmp_path / "none", save_interval=1)
    ended = train(words, 1)
    assert ended.statuses == (2,) and len(ended.errors) == 1
    assert f"--epp-layouts {path}:2: tp 3 pp 1 cp 1 ep 1: " in ended.errors[0]
    assert not (tmp_path / "none").exists()
