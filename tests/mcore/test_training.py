"""``--epp`` inside Megatron's trainer: resuming, checkpoints both ways, Megatron's own numbers."""

import json
import re
from argparse import Namespace
from collections import Counter
from pathlib import Path

import numpy
import pytest
import torch

from megatron_epp.__main__ import main
from megatron_epp.corpus.epochs import epoch_order
from megatron_epp.corpus.idx_file import read_index
from megatron_epp.ir import Step
from megatron_epp.mcore.trainer.setup import _limit_fusion_warm_up
from tests.mcore.resumes import (
    Job,
    Six,
    after_three,
    first_and_third,
    require_megatrons_own_numbers,
    require_three_more_alike,
    six_iterations,
    tensors,
    to_megatron_and_back,
)
from tests.mcore.runs import flags, trained
from tests.mcore.test_refusals import EXPERTS


def recorded(folder: Path) -> dict[str, Path]:
    return {"epp_record": folder / "plans", "tensorboard_dir": folder / "events"}


@pytest.fixture(scope="module")
def six(corpus, tmp_path_factory) -> Six:
    """On two stages."""
    folder = tmp_path_factory.mktemp("six")
    return six_iterations(Job(corpus), folder, **recorded(folder))


# What TensorBoard shows of a run of two stages.
NAMES = {
    "tokens-per-second",
    "seconds",
    "predicted-seconds",
    "bubble-ratio",
    "recomputed-layers-ratio",
    "recomputed-in-part-ratio",
    "chunks",
    "planner-wait-seconds",
    "planner-iterations-ahead",
    "planner-discarded-plans",
    "truncated-documents",
    *(f"peak-gib-rank-{rank}" for rank in range(2)),
}


def step(folder: Path, iteration: int) -> Step:
    return Step.parse((folder / "plans" / f"iteration-{iteration:06d}.step").read_text())


def test_three_and_three_are_six_bit_for_bit(six, tmp_path):
    require_three_more_alike(six, tmp_path, epp_record=tmp_path / "plans")
    for iteration in (4, 5, 6):
        name = f"plans/iteration-{iteration:06d}.step"
        assert (six.folder / name).read_text() == (tmp_path / name).read_text()


def test_recorded_chunks_are_found_in_the_corpus(six, corpus, capsys):
    """By the steps of training: batches of 6, in the order of the seed, truncated to 128 inputs."""
    lengths = read_index(Path(f"{corpus}.idx")).lengths.astype(int)
    tokens = numpy.fromfile(f"{corpus}.bin", numpy.uint16)
    begins = numpy.cumsum(lengths) - lengths
    for iteration in range(1, 7):
        name = six.folder / f"plans/iteration-{iteration:06d}.step"
        assert main(["where", str(name), "--json"]) == 0
        found = iter(json.loads(capsys.readouterr().out))
        (plan,), (dealt,) = (
            step(six.folder, iteration).plans,
            step(six.folder, iteration).assignments,
        )
        for span, one in [(span, next(found)) for chunk in plan.chunks for span in chunk.spans]:
            sample = 6 * (iteration - 1) + dealt[span.document]
            epoch, item = divmod(sample, len(lengths))
            sequence = int(epoch_order(len(lengths), 1234, epoch)[item])
            start, stop = begins[sequence] + span.start, begins[sequence] + span.stop
            assert plan.documents[span.document] == min(lengths[sequence] - 1, 128)
            assert (one["corpus"], one["sequence"]) == (str(corpus), sequence)
            assert (one["samples"], one["span"]) == ([sample], str(span))
            assert one["tokens"] == f"{span.start}:{span.stop}"
            assert one["begins_with"] == tokens[start : min(stop, start + 12)].tolist()
        assert next(found, None) is None


# Clocks, rates, places in memory, and lines about what was measured: a slow rank, a late plan.
MEASURED = (
    r"(?:WARNING:megatron_epp|INFO:\S+:iteration \d+: [\d.]+ s of waiting|INFO:\S+cost_monitor:).*"
    r"|0x\w+|[-\d]+ [\d:]+\.\d+|\d+ tokens/s|\d+ ms|[+-]?\d+\.\d+(?![\dE])"
)


@pytest.mark.everything
def test_forked_ranks_print_what_torchruns_print(six, tmp_path):
    """In any order, and without ends of lines: torchrun's two may print into one another's."""
    started = six_iterations(six.job, tmp_path, afresh=True, **recorded(tmp_path))
    assert started.run.losses == six.run.losses and started.run.grad_norms == six.run.grad_norms
    letters = [
        Counter(re.sub(MEASURED, "", each.run.output.replace(str(each.folder), "")))
        for each in (started, six)
    ]
    for each in letters:
        del each["\n"]
    assert letters[0] == letters[1] and letters[0].total() > 50_000


def test_an_output_layer_over_the_stages_goes_on_alike(six, tmp_path):
    """From a checkpoint of a whole one, and to a checkpoint that holds it as if it were whole."""
    start, saved = after_three(six.folder, tmp_path), tmp_path / "resumed"
    how = {"load": start, "save": saved, "save_interval": 6, "epp_record": tmp_path / "plans"}
    spread = six.job.train(train_iters=6, epp=True, epp_vocab_parallel="on", **how)
    theirs = first_and_third(six.run.losses[3:])
    assert first_and_third(spread.losses) == pytest.approx(theirs, rel=2e-6)
    assert spread.grad_norms == pytest.approx(six.run.grad_norms[3:], abs=2e-3)
    assert all(plan.vocabulary_parallel for plan in step(tmp_path, 4).plans)
    assert not any(plan.vocabulary_parallel for plan in step(six.folder, 4).plans)
    mine = tensors(saved / "iter_0000006", tmp_path / "mine.pt")
    assert mine.keys() == tensors(six.folder / "iter_0000006", tmp_path / "theirs.pt").keys()
    (layer,) = (name for name in mine if name.endswith("output_layer.weight") and "opt" not in name)
    assert mine[layer].shape == (128, 32)


@pytest.mark.everything
def test_tied_words_over_the_stages(corpus, tmp_path):
    """The embedding's words and their copies, which a checkpoint does not tell apart, step as whole
    ones do, three and three iterations are six, and they go to Megatron and back."""
    tied = Job(corpus, {"untie_embeddings_and_output_weights": None})
    ours, resumed = tmp_path / "ours", tmp_path / "again"
    ours.mkdir()
    resumed.mkdir()
    whole = tied.train(train_iters=6, exit_interval=3, epp=True)
    spread = six_iterations(tied, ours, epp_vocab_parallel="on")
    assert len(whole.losses) == 3
    assert spread.run.losses[:3] == pytest.approx(whole.losses, rel=2e-6)
    assert spread.run.grad_norms[:3] == pytest.approx(whole.grad_norms, abs=2e-3)
    mine = require_three_more_alike(spread, resumed, epp_vocab_parallel="on")
    assert not any("output_layer" in name for name in mine)
    to_megatron_and_back(
        tied,
        resumed,
        # Other ranks, and padded to another number of words.
        stock={"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1},
        ours={"epp_vocab_parallel": "on"},
    )


def test_checkpoints_load_both_ways(six, tmp_path):
    to_megatron_and_back(six.job, after_three(six.folder, tmp_path))


def test_equal_documents_give_megatrons_own_numbers(tmp_path):
    """In batches of 2, 4, 4 and 6 documents."""
    growing = {"step_batch_size_schedule": "0:2 128:4 640:6", "global_batch_size": None}
    counted = {"train_samples": 16, "train_iters": None}
    both = require_megatrons_own_numbers(tmp_path, growing | counted, processes=2)
    for run in both:
        assert re.findall(r"global batch size: +(\d+)", run.output) == ["2", "4", "4", "6"]


def test_mock_documents_are_megatrons(tmp_path):
    changes = {"data_path": None, "mock_data": True, "pipeline_model_parallel_size": 1}
    words = flags(tmp_path, **changes, train_iters=2, epp=True, epp_record=tmp_path / "plans")
    assert len(trained(words, processes=1).losses) == 2
    theirs = numpy.random.default_rng(0).integers(1, 4096, 100_000, numpy.int32) - 1
    training = theirs[:33_333]  # Megatron takes a third of mock data for each split
    lengths = training[training > 0]
    order = epoch_order(len(lengths), 1234, 0)
    for iteration in (1, 2):
        drawn = lengths[order[6 * iteration - 6 : 6 * iteration]]
        assert step(tmp_path, iteration).lengths == tuple(drawn.clip(max=128))


def test_tensorboard_shows_every_iteration(six) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = (six.folder / "events").glob("events.out.tfevents.*")
    read = EventAccumulator(str(file))
    read.Reload()
    curves = {tag.removeprefix("epp/") for tag in read.Tags()["scalars"] if tag.startswith("epp/")}
    assert curves == NAMES

    def curve(name: str) -> list[float]:
        points = read.Scalars(f"epp/{name}")
        assert [point.step for point in points] == [1, 2, 3, 4, 5, 6]
        return [point.value for point in points]

    assert curve("truncated-documents") == [2.0] * 6
    # The log says the same of every iteration.
    line = r"epp iteration \d: (\d+) tokens in (\d+) chunks \| ([\d.]+) s, predicted ([\d.]+) s"
    said = re.findall(line, six.run.output)
    assert len(said) == 6
    for number, (tokens, chunks, seconds, predicted) in enumerate(said):
        assert curve("chunks")[number] == int(chunks)
        assert curve("seconds")[number] == pytest.approx(float(seconds), abs=6e-4)
        assert curve("predicted-seconds")[number] == pytest.approx(float(predicted), abs=6e-4)
        rate = int(tokens) / curve("seconds")[number]
        assert curve("tokens-per-second")[number] == pytest.approx(rate, rel=1e-5)
    peaks = re.findall(r"peak ([\d.]+) of [\d.]+ ([\d.]+) of [\d.]+ MiB", six.run.output)
    for rank in range(2):
        mib = [1024 * gib for gib in curve(f"peak-gib-rank-{rank}")]
        assert mib == pytest.approx([float(found[rank]) for found in peaks], abs=0.06)
    assert all(0 <= ratio < 1 for ratio in curve("bubble-ratio"))
    assert all(wait >= 0 for wait in curve("planner-wait-seconds"))
    assert "lm loss" in read.Tags()["scalars"]


# What is drawn from the generator that Megatron's warm-up of fused functions draws from before.
DRAWN_LATE = {"routers": EXPERTS, "sinks": {"softmax_type": "learnable"}, "neither": {}}


@pytest.mark.parametrize("kind", DRAWN_LATE)
def test_first_weights_are_megatrons_own(corpus, tmp_path, kind: str):
    """Bit for bit after an iteration at learning rate 0; and a context whose warm-up is left out
    is named, as it changes them."""
    common = {"pipeline_model_parallel_size": 1, "train_iters": 1, "lr": 0, **DRAWN_LATE[kind]}
    weights = []
    for name in ("epp", "stock"):
        how = {"epp": True} if name == "epp" else {"micro_batch_size": 1}
        save = {"save": tmp_path / name, "save_interval": 1}
        run = trained(flags(corpus, **common, **how, **save), processes=1)
        assert "warm-up of fused functions" not in run.output
        saved = tensors(tmp_path / name / "iter_0000001", tmp_path / f"{name}.pt")
        weights.append({key: one for key, one in saved.items() if not key.startswith(".opt")})
    ours, theirs = weights
    assert ours.keys() == theirs.keys() and len(ours) > 5
    late = {"routers": "router.weight", "sinks": "softmax_offset", "neither": "weight"}[kind]
    assert any(late in key and one.float().std() > 0 for key, one in ours.items()), ours.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


def test_a_warm_up_that_is_left_out_is_said():
    sizes = {"hidden_size": 4096, "ffn_hidden_size": 14336, "bf16": True, "fp16": False}
    degrees = {"context_parallel_size": 1, "tensor_model_parallel_size": 8}
    args = Namespace(**sizes, **degrees, softmax_type="vanilla", num_experts=8)
    for context, lines in ((131072, 0), (262144, 1)):
        args.seq_length = context
        assert len(said := _limit_fusion_warm_up(args)) == lines
        assert args.epp_no_fusion_warm_up is bool(lines)
    assert "(1.8 GiB at --seq-length 262144): first weights of routers" in said[0]
    args.num_experts = None
    assert _limit_fusion_warm_up(args) == [] and args.epp_no_fusion_warm_up
