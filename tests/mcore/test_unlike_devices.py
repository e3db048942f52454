"""Devices of unlike speed at a start with --epp-layouts; one that becomes slow while training."""

import json
import re
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_epp.cost.analytic import profile
from megatron_epp.cost.catalogue.devices import device
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.ir import Step
from megatron_epp.mcore.calibrate.profile_file import FILE_NAME
from megatron_epp.mcore.choose import rank_order
from megatron_epp.mcore.choose.layouts import AllowedLayout, ChosenLayout
from megatron_epp.mcore.choose.rank_order import ordered, orders, speeds_of
from megatron_epp.mcore.job import device_speeds
from megatron_epp.mcore.job.device_speeds import SPEEDS_FILE, keep_speeds, read_speeds
from tests.mcore.runs import flags, trained, write_corpus
from tests.mcore.test_uneven_batches import exact

pytestmark = pytest.mark.everything

SLOW_RANK = (str(Path(__file__).with_name("slow_rank.py")),)


def test_orders_of_ranks() -> None:
    """Rank 0 first; tensors of a stage stay together; the slowest wait as spares."""
    assert list(orders((1, 1.5, 1, 1), 1, 2, 4)) == [(0, 1, 2, 3), (0, 3, 2, 1), (0, 2, 3, 1)]
    slow_nodes = (1, 1, 2, 2, 1, 1, 2, 2)  # of two devices each, which share tensors
    in_replicas, on_stages = orders(slow_nodes, 2, 2, 8)
    assert in_replicas == tuple(range(8))  # as they are
    assert on_stages == (0, 1, 4, 5, 2, 3, 6, 7)
    for order in orders((1, 3, 1, 1, 2), 1, 2, 4):
        assert order[0] == 0 and order[4] == 1 and sorted(order) == [0, 1, 2, 3, 4]
    for order in orders((1, 1, 3, 1, 1), 2, 1, 4):
        assert order == (0, 1, 2, 3, 4)  # the last fills no unit, whatever is slow


def test_slowness_by_place() -> None:
    layout = AllowedLayout(tp=2, pp=2)
    chosen = ChosenLayout(layout, 9, 8, 0.0, (1, 2, 1, 1, 1, 1, 1, 3, 1))
    # Replicas of ranks 0 1 | 4 5 and 2 3 | 6 7.
    assert chosen.slowness == (2, 1, 1, 3)
    moved = ChosenLayout(layout, 9, 8, 0.0, chosen.speeds, (0, 1, 2, 3, 6, 7, 4, 5, 8))
    assert moved.slowness == (2, 3, 1, 1)
    assert ChosenLayout.from_json(moved.to_json()) == moved
    line = moved.line("f")
    assert line.endswith("spares: ranks 8; slow ranks (times the fastest): 1 (2), 7 (3); order of "
                         "ranks 0 1 2 3 6 7 4 5")  # fmt: skip
    assert ChosenLayout(layout, 8, 8, 0.0).slowness == ()


def test_the_fastest_order_is_taken_where_it_pays(monkeypatch) -> None:
    taken = {(0, 1, 2, 3): 1.0, (0, 3, 2, 1): 0.9, (0, 2, 3, 1): 0.899}
    monkeypatch.setattr(rank_order, "seconds_of", lambda args, one: taken[one.order])
    args = SimpleNamespace(expert_tensor_parallel_size=1)
    chosen = ChosenLayout(AllowedLayout(pp=2), 4, 4, 5.0, (1, 1.5, 1, 1))
    assert ordered(args, chosen).order == (0, 3, 2, 1)  # the third saves too little
    assert ordered(args, chosen).seconds == 0.9
    taken[0, 3, 2, 1] = taken[0, 2, 3, 1] = 0.999
    assert ordered(args, chosen).order == (0, 1, 2, 3)


def test_speeds_are_kept_by_device(tmp_path: Path, monkeypatch) -> None:
    ranks = [("a 0", 0), ("a 1", 1), ("b 0", 2), ("b 1", 3)]

    def gathered(every: list, own: tuple, group: object) -> None:
        assert own == (f"{socket.gethostname()} 0", 3)
        every[:] = ranks

    monkeypatch.setattr(device_speeds.dist, "all_gather_object", gathered)
    monkeypatch.setenv("LOCAL_RANK", "0")
    control = SimpleNamespace(size=lambda: 4, rank=lambda: 0)
    groups = SimpleNamespace(control=control, replica=1, pipeline_size=2, pipeline_rank=1)
    folder = str(tmp_path)
    keep_speeds((), groups, folder)
    assert read_speeds(folder) is None and speeds_of(["a 0"], folder) == ()  # alike, and never else
    keep_speeds((1, 1, 1.5, 1), groups, folder)
    assert speeds_of(["b 0", "a 0", "c 7"], folder) == (1.5, 1, 1)
    assert speeds_of(["b 0", "b 0"], folder) == (1, 1)  # the slow ones alone
    ranks[:] = [("b 0", 0), ("c 0", 1), ("c 1", 2), ("c 2", 3)]
    keep_speeds((1, 2), groups, folder)  # of all replicas
    assert read_speeds(folder) == {
        "a 0": 1,
        "a 1": 1,
        "b 1": 1,
        "b 0": 1,
        "c 0": 2,
        "c 1": 1,
        "c 2": 2,
    }
    for damaged in ("[1]", '{"a 0": 0.5}', '{"a 0": "x"}', "{"):
        (tmp_path / SPEEDS_FILE).write_text(damaged)
        with pytest.raises(ValueError, match=r"no speeds of devices .* delete the file"):
            read_speeds(folder)


def test_a_rank_becomes_slow_documents_move_and_a_restart_orders_its_ranks(tmp_path: Path) -> None:
    """slow_rank.py says that two ranks take 1.5 times as long as predicted; losses stay the same.

    They are at different stages of both replicas, so both are slow, the first one at the stage with
    most layers.
    """
    lengths = [97, 60, 40, 26, 90, 12, 65, 30, 52, 128, 129, 21, 50, 77, 18, 150, 33, 80, 61, 11]
    corpus, folder = write_corpus(tmp_path / "documents", lengths * 4), tmp_path / "kept"
    folder.mkdir()
    shape = Model("small", 4, 32, 128, 4, 2, 8, 128, gated=True)
    profile(shape, device("cpu"), logits_held=False).save(str(folder / FILE_NAME))
    (tmp_path / "layouts").write_text("pp 2\n")
    how = {"epp": True, "global_batch_size": 8, "train_iters": 8, "clip_grad": 0, "epp_effort": 0}
    how |= {"lr_decay_style": "constant", "epp_partition": "auto", "epp_cost_model": None}
    how |= {"epp_layouts": tmp_path / "layouts", "load": folder, "save": folder}
    how |= {"save_interval": 6}
    first = trained(flags(corpus, **how, epp_record=tmp_path / "first"), 4, SLOW_RANK)
    for place in ("1 of replica 0", "0 of replica 1"):
        assert f"slow rank: pipeline rank {place} takes 1.50 times what the" in first.output
    moved = "from iteration 6 on: ranks count as 1 1.5 1.5 1 times as slow as the fastest"
    assert first.output.count(moved) == 1
    host = socket.gethostname()
    assert json.loads((folder / SPEEDS_FILE).read_text()) == {
        f"{host} {rank}": factor for rank, factor in enumerate((1, 1.5, 1.5, 1))
    }
    tokens = {}
    for iterations in ((3, 4, 5), (6, 7, 8)):
        files = (tmp_path / "first" / f"iteration-00000{each}.step" for each in iterations)
        plans = zip(*(Step.parse(file.read_text()).plans for file in files), strict=True)
        tokens[iterations[0]] = [sum(sum(p.documents) for p in of_one) for of_one in plans]
    assert tokens[3][0] > 0.85 * tokens[3][1]
    assert tokens[6][0] < 0.8 * tokens[6][1]  # the other one has more from then on
    # The next start knows: layers and the order of ranks are other ones.
    for file in folder.glob("latest*"):
        file.write_text("6")
    how |= {"save": None, "epp_record": tmp_path / "second"}
    again = trained(flags(corpus, **how), 4, SLOW_RANK)
    slow = r"slow ranks \(times the fastest\): 1 \(1.5\), 2 \(1.5\); order of ranks ([\d ]+)"
    (order,) = re.findall(slow, again.output)
    assert order.strip() in ("0 1 3 2", "0 3 1 2")  # in one replica, or on one stage
    assert "chosen anew, as the checkpoint's run had another layout" in again.output
    assert f"by {folder}/epp-cost-model.from-000006.json (simulated)" in again.output
    assert exact(again) == pytest.approx(exact(first)[6:], rel=1e-12)
