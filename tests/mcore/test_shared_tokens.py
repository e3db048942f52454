"""Prefixes that documents of a batch share: found in their tokens, checked in recorded plans."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

from megatron_epp.control.accept import accept
from megatron_epp.control.step_source import SourcedStep, planned_documents
from megatron_epp.corpus.lengths import DEFAULT_SEED
from megatron_epp.corpus.shared_prefixes import PrefixForest, lengths_of
from megatron_epp.ir import Plan, PlanError, Step
from megatron_epp.mcore.choose.choices import first_batches
from megatron_epp.mcore.data.global_batches import Batch, GlobalBatches
from megatron_epp.mcore.data.shared_tokens import SharedTokens
from megatron_epp.mcore.trainer.stage_runner import StageRunner
from megatron_epp.planner.choose import FIRST_BATCHES
from tests.cli.training import documents_of
from tests.mcore.runs import write_documents


class Words:
    """Documents of given tokens, which notes what is read."""

    def __init__(self, *texts: str):
        self.texts, self.read = [numpy.frombuffer(text.encode(), numpy.uint8) for text in texts], {}

    def batch(self) -> Batch:
        lengths = numpy.array([len(text) - 1 for text in self.texts])
        return Batch(numpy.arange(len(lengths)), lengths)

    def inputs(self, sample: int, start: int, stop: int) -> numpy.ndarray:
        self.read[sample] = max(stop, self.read.get(sample, 0))
        return self.texts[sample][start:stop]

    def targets(self, sample: int, start: int, stop: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        assert stop < len(self.texts[sample])
        return self.texts[sample][start + 1 : stop + 1], numpy.ones(stop - start)


def alike(one: numpy.ndarray, other: numpy.ndarray, depths: int) -> int:
    """How many rows are equal, with all that they predict."""
    count = 0
    while count < min(len(one), len(other)) - 1:
        windows = [each[count : count + 2 + depths].tolist() for each in (one, other)]
        if windows[0] != windows[1]:
            break
        count += 1
    return count


@pytest.mark.parametrize("depths", [0, 1])
def test_stages_are_chosen_for_batches_that_share_as_training_does(
    tmp_path: Path, parse: Callable[..., Namespace], depths: int
) -> None:
    """Of a blend, documents of one corpus share."""
    random, size, least = numpy.random.default_rng(depths), 6, 3
    prompt = random.integers(2, 9, 30).tolist()
    corpora = []
    for name in ("one", "two"):
        texts = [[*prompt[: random.integers(31)], *random.integers(2, 9, 8)] for _ in range(13)]
        corpora.append(write_documents(tmp_path / name, texts))

    def batches(*paths: Path) -> list[Sequence[int] | PrefixForest]:
        words = "--seq-length=24 --epp-overlong=truncate --epp-blend=documents --epp"
        args = parse(*words.split(), "--data-path", *map(str, paths))
        args.global_batch_size, args.mock_data, args.mtp_num_layers = size, False, depths or None
        whole = first_batches(args)
        args.epp_share_from = least
        found = [planned_documents(batch) for batch in first_batches(args)]
        assert [*map(list, map(lengths_of, found))] == whole
        return found

    for corpus in corpora:
        documents = documents_of([corpus], None, 24, random_seed=DEFAULT_SEED)
        trained, shared = GlobalBatches(documents, size, 0), SharedTokens(least, depths)
        forests = [shared.forest(documents, next(trained)) for _ in range(FIRST_BATCHES)]
        assert batches(corpus) == forests and all(forest.shares for forest in forests)
    for found in batches(*corpora):
        assert isinstance(found, PrefixForest) and found.shares
        assert all(found.shared(one, other) == 0 for one in range(3) for other in range(3, 6))


@pytest.mark.parametrize("depths", [0, 1, 3])
@pytest.mark.parametrize("least", [1, 3])
def test_a_prefix_ends_where_what_its_rows_predict_differs(depths: int, least: int) -> None:
    random = numpy.random.default_rng([depths, least])
    for _ in range(30):
        texts: list[str] = []
        for _ in range(8):
            begin = texts[random.integers(len(texts))] if texts and random.random() < 0.8 else ""
            begin = begin[: random.integers(1 + len(begin))]
            texts.append(begin + "".join(random.choice(list("ab"), random.integers(2, 9))))
        words = Words(*texts)
        forest = SharedTokens(least, depths).forest(words, words.batch())
        forest.require([len(text) - 1 for text in texts])
        for one in range(8):
            for other in range(one):
                expected = alike(words.texts[one], words.texts[other], depths)
                found = forest.shared(one, other)
                if least == 1 or expected < least:
                    assert found == (expected if expected >= least else 0)
                else:  # of what follows a shared prefix fewer than ``least`` are not shared
                    assert expected - least < found <= expected


def test_documents_that_begin_apart_are_not_read_to_the_end() -> None:
    words = Words("abcdefghij", "abcdxfghij", "xbcdefghij", "abc")
    shared = SharedTokens(4)
    forest = shared.forest(words, words.batch())
    assert not forest.shares and words.read == {0: 4, 1: 4, 2: 4}
    words = Words("abcdefghij", "abcdexghij", "xbcdefghij", "abc")
    assert shared.forest(words, words.batch()).tokens == 9 + 9 + 9 + 2 - 4
    assert words.read == {0: 9, 1: 9, 2: 4}
    words.read.clear()
    shared.forest(words, words.batch())
    assert not words.read  # of a batch that was planned ahead


TREE = """plan v1
documents 4 5 5
prefix 1: 0[0:4]
prefix 2: 0[0:4]
layers 1
chunk 0: 0[0:4] 1[0:5]
chunk 1: 2[0:5]
stage 0: F0 F1 B1 B0
"""


def test_a_recorded_plan_runs_only_where_documents_begin_alike() -> None:
    step = Step.parse(TREE)
    assert step.lengths == (9, 9)
    sourced = SourcedStep(step, str(step), "--epp-plan x: the plan")

    def accepts(least: int, *texts: str) -> None:
        words = Words(*texts)
        lengths = SharedTokens(least).lengths(words, words.batch())
        accept(sourced, lengths, False, (1,), 0, 1)

    accepts(1, "abcdefghij", "abcdexxxxx")
    accepts(4, "abcdefghij", "abcdefxxxx")
    for least, other, found in ((1, "abcdxfghij", 3), (5, "abcdexxxxx", 0), (1, "xbcdefghij", 0)):
        with pytest.raises(PlanError) as refusal:
            accepts(least, "abcdefghij", other)
        assert str(refusal.value) == (
            "--epp-plan x: the plan computes 4 inputs of documents 0 and 1 once; those of the "
            f"batch share {found} (--epp-share-from): give the data and the --epp-share-from of "
            "the run that made the plan"
        )
    with pytest.raises(PlanError, match="those of the batch share 0"):
        accept(sourced, [9, 9], False, (1,), 0, 1)


def test_megatrons_flops_count_what_is_computed() -> None:
    class Runner:
        class programs:  # noqa: N801
            device = torch.device("cpu")

    def sums(text: str) -> tuple[float, float]:
        boundaries: Tensor = StageRunner.flop_boundaries(Runner(), Plan.parse(text))
        lengths = boundaries.diff().double()
        return lengths.sum().item(), (lengths**2).sum().item()

    assert sums(TREE) == pytest.approx((14, 16 + 2 * (81 - 16)))
    assert sums("plan v1\ndocuments 4 5\nlayers 1\nchunk 0: 0[0:4] 1[0:5]\nstage 0: F0 B0\n") == (
        9,
        41,
    )
