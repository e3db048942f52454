"""What TensorBoard shows of a run: read back from its own event file."""

import re

import pytest

from tests.mcore.runs import flags, trained, write_corpus

STAGES = 2
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
    *(f"peak-gib-rank-{rank}" for rank in range(STAGES)),
}


def test_every_iteration_is_in_the_event_file(tmp_path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # Of 12 documents, 3 have more inputs than the context.
    corpus = write_corpus(tmp_path / "documents", [97, 200, 40, 129, 300, 9, 12, 65, 30, 150, 2, 7])
    events = tmp_path / "events"
    run = trained(flags(corpus, epp=True, tensorboard_dir=events, train_iters=3))
    (file,) = events.glob("events.out.tfevents.*")
    read = EventAccumulator(str(file))
    read.Reload()
    curves = {tag.removeprefix("epp/") for tag in read.Tags()["scalars"] if tag.startswith("epp/")}
    assert curves == NAMES

    def curve(name: str) -> list[float]:
        points = read.Scalars(f"epp/{name}")
        assert [point.step for point in points] == [1, 2, 3]
        return [point.value for point in points]

    assert curve("truncated-documents") == [3.0] * 3
    # The log says the same of every iteration.
    line = r"epp iteration \d: (\d+) tokens in (\d+) chunks \| ([\d.]+) s, predicted ([\d.]+) s"
    said = re.findall(line, run.output)
    assert len(said) == 3
    for number, (tokens, chunks, seconds, predicted) in enumerate(said):
        assert curve("chunks")[number] == int(chunks)
        assert curve("seconds")[number] == pytest.approx(float(seconds), abs=6e-4)
        assert curve("predicted-seconds")[number] == pytest.approx(float(predicted), abs=6e-4)
        rate = int(tokens) / curve("seconds")[number]
        assert curve("tokens-per-second")[number] == pytest.approx(rate, rel=1e-5)
    peaks = re.findall(r"peak ([\d.]+) of [\d.]+ ([\d.]+) of [\d.]+ MiB", run.output)
    for rank in range(STAGES):
        mib = [1024 * gib for gib in curve(f"peak-gib-rank-{rank}")]
        assert mib == pytest.approx([float(found[rank]) for found in peaks], abs=0.06)
    assert all(0 <= ratio < 1 for ratio in curve("bubble-ratio"))
    assert all(wait >= 0 for wait in curve("planner-wait-seconds"))
    assert "lm loss" in read.Tags()["scalars"]
