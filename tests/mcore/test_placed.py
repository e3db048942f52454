"""Several stages on a rank: what the plain model computes, whatever the placement. What cannot be
placed, and flags of virtual stages: test_default_placement.py."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import GPT, LLAMA, Trial, read
from megatron_epp.ir import Kind, Message, Op, Plan, Step, Transfer, parse_records
from megatron_epp.mcore.model.stage import reduce_in_turn
from megatron_epp.sim.play import play
from tests.certify.planned import PlansOf
from tests.certify.trial import CheckedTrial, read_checked
from tests.mcore.certified import certified
from tests.mcore.models import TRAINED_MOE, TRAINED_SSM
from tests.mcore.resumes import OPTIMIZER, STOCK, STOCK_ON_DOCUMENTS, Job
from tests.mcore.runs import PROGRAM, flags, trained, write_corpus
from tests.mcore.test_refusals import refused
from tests.plans import random_table

pytestmark = pytest.mark.everything

PLAIN_OPTIMIZER = dict.fromkeys(OPTIMIZER)
HYBRID_PROGRAM = ("-m", "megatron_epp.pretrain_hybrid")


def model(flags: str, stages: int, *placement: str) -> tuple[str, ...]:
    words = f"{flags} --num-layers {2 * stages} --epp-placement".split()
    return (*words, *placement)


def test_both_ends_on_one_rank_with_replicas() -> None:
    """A V, whose ends share a rank: of a model with a head of its own, and of one whose embedding
    is tied to it; gradients are reduced in buckets while ops run, where every plan has an order of
    its own."""
    models = model(LLAMA, 4, "v"), model(GPT, 4, "v")
    trial = Trial(Degrees(pp=2, tp=1, dp=2), models, batches=6, overlap=True)
    lines, judged = certified(trial, "split", "hybrid", "packed", "halved", "offloaded")
    assert sum("stages on ranks 1 0 0 1" in line for line in lines) == 2
    for batch in judged:  # from rank 1 to 0 and on to itself and back: two links each way
        assert batch.coverage.messages == 4 * batch.coverage.chunks


def test_words_over_stages_that_lie_anywhere(tmp_path: Path) -> None:
    """Three ranks with one, two and three stages, neither end alone, uneven layers; words over all
    stages, tied to the embedding of the first."""
    file = tmp_path / "placement"
    file.write_text("rank 0: 2\nrank 1: 0 4\nrank 2: 1 3 5\nlayers 1 2 1 1 2 1\n")
    words = f"{GPT} --num-layers 8 --epp-vocab-parallel on --epp-placement {file}".split()
    lines, _ = certified(Trial(Degrees(pp=3, tp=1, dp=1), (tuple(words),), batches=2))
    assert any("stages on ranks 1 2 0 2 1 2" in line for line in lines)


@pytest.mark.parametrize(("planner", "placement"), [("zb-v", "v"), ("slimpipe", "interleaved 2")])
def test_plans_of_published_methods_compute_the_same(planner: str, placement: str) -> None:
    """In the executor of all others: backwards split over a V; slices over interleaved stages."""
    trial = CheckedTrial(
        Degrees(2, 1, 1), (model(LLAMA, 4, placement),), batches=3, planner=planner
    )
    kept, other = ("halved", "split") if planner == "zb-v" else ("split", "halved")
    _, judged = certified(trial, kept)
    assert not any(getattr(batch.coverage, other) for batch in judged)


def test_certificates_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="leave --loop and --trees out"):
        read_checked(["--pp", "2", "--planner", "epp", "--trees"])
    with pytest.raises(ValueError, match="--placement auto: a certificate is of one placement"):
        read(["--pp", "2", "--placement", "auto"])
    for planner, said in (("zb-v", "expected the placement v"), ("zbv", "did you mean zb-v")):
        with pytest.raises(ValueError, match=said):
            PlansOf(planner, (1,) * 4, (0, 1, 0, 1), False)([60, 30])


def test_the_command_line_names_placements() -> None:
    trial = read(["--pp", "2", "--placement", "interleaved", "2", "--dp", "2"])
    assert all(words[-2:] == ("--epp-placement", "interleaved 2") for words in trial.models)
    assert all(words[words.index("--num-layers") + 1] == "8" for words in trial.models)
    assert trial.degrees == Degrees(2, 1, 2)


def require_recorded_in_simulated_order(folder: Path, iteration: int, place: tuple) -> None:
    """Ops of every rank and messages of every link of a recorded iteration stand as a simulation
    of its plan has them, whatever seconds that is given."""
    name = f"iteration-{iteration:06d}"
    (plan,) = Step.parse((folder / f"{name}.step").read_text()).plans
    assert plan.place == place
    recorded = parse_records((folder / f"{name}.replica-0.timed").read_text())
    played = play(plan, random_table(plan, iteration))
    flights = sorted(played.flights, key=lambda flight: flight.depart)
    assert flights
    for rank in range(plan.ranks):
        mine, its = (
            sorted((r for r in of if plan.rank_of[r.stage] == rank), key=lambda r: r.start)
            for of in (recorded, played.records)
        )
        ran = [(r.stage, r.op) for r in mine if isinstance(r.op, Op)]
        assert ran == [(r.stage, r.op) for r in its]
        transfers = [r.op for r in mine if isinstance(r.op, Transfer)]
        for kind, end in ((Kind.SEND, "source"), (Kind.RECEIVE, "target")):
            found = [t.message for t in transfers if t.kind is kind]
            simulated = [
                flight.message
                for flight in flights
                if plan.rank_of[getattr(flight.message, end)] == rank
            ]
            assert by_link(found, plan) == by_link(simulated, plan)


def by_link(messages: Sequence[Message], plan: Plan) -> dict[tuple, list[Message]]:
    found: dict[tuple, list[Message]] = {}
    for one in messages:
        link = one.payload, plan.rank_of[one.source], plan.rank_of[one.target]
        found.setdefault(link, []).append(one)
    return found


def test_checkpoints_go_from_placement_to_placement_and_to_megatron(tmp_path: Path) -> None:
    """One iteration as a V, one interleaved, one of Megatron's own schedule without --epp, one of
    stages of uneven layers that lie anyhow, each from the checkpoint of the one before: losses and
    gradient norms of a V that was never interrupted. All recorded ones ran in the order in which
    a simulation of their plans has them."""
    # Equal documents: Megatron's own schedule takes one of them a micro-batch.
    way = {"seq_length": 64, "max_position_embeddings": 64, "num_layers": 5, "train_iters": 4,
           "pipeline_model_parallel_layout": "Ettt|ttL", "lr_decay_style": "constant"}  # fmt: skip
    corpus = write_corpus(tmp_path / "corpus", [65] * 24)
    ours, stock = Job(corpus, way), Job(corpus, way, STOCK_ON_DOCUMENTS)
    free = {"pipeline_model_parallel_layout": None, "epp": True}
    whole = ours.train(**free, epp_placement="v")
    # Of the second iteration of a run Megatron's log shows the mean with the first.
    first, mean, *others = whole.losses
    losses, norms = [], []
    for number, (job, placement, place) in enumerate(
        (
            (ours, "v", (1, 0, 0, 1)),
            (ours, "interleaved 2", (0, 1, 0, 1)),
            (stock, None, ()),
            (ours, "place 1 0 1 0 1 layers 1 1 1 1 1", (1, 0, 1, 0, 1)),
        ),
        1,
    ):
        how: dict[str, object] = dict(STOCK)
        if placement is not None:
            how = {**free, "epp_placement": placement, "epp_record": tmp_path / f"{number}"}
        if number > 1:
            how["load"] = tmp_path / "saved"
        run = job.train(**how, save=tmp_path / "saved", save_interval=1, exit_interval=number)
        losses += run.losses
        norms += run.grad_norms
        if placement is not None:
            require_recorded_in_simulated_order(tmp_path / f"{number}", number, place)
    assert losses == pytest.approx([first, 2 * mean - first, *others], rel=1e-5)
    assert norms == pytest.approx(whole.grad_norms, abs=2e-3)


@pytest.mark.parametrize(
    ("placement", "more"),
    [
        (None, {}),  # the job chooses
        ("v", {}),
        ("interleaved 2", {**TRAINED_SSM, **TRAINED_MOE, "hybrid_layer_pattern": "*-EM*-EG"}),
        ("v", {"untie_embeddings_and_output_weights": None, "epp_vocab_parallel": "on"}),
        ("interleaved 3", {"num_layers": 6, "epp_vocab_parallel": "on"}),
        ("interleaved 4", {"num_layers": 8, "epp_vocab_parallel": "on", **PLAIN_OPTIMIZER}),
    ],
)
def test_what_is_measured_at_its_start_computes_whole_documents(
    placement: str | None, more: dict, tmp_path: Path
) -> None:
    """Begun, stopped and resumed with the cost model that it measured: losses and gradient norms of
    Megatron's own schedule on one stage, of one document a micro-batch, from the same weights."""
    corpus = write_corpus(tmp_path / "corpus", [65] * 30)
    way = {"seq_length": 64, "max_position_embeddings": 64, "train_iters": 5,
           "lr_decay_style": "constant", **more}  # fmt: skip
    one = {**STOCK, "processes": 1, "pipeline_model_parallel_size": 1}
    if placement == "interleaved 3":
        one["make_vocab_size_divisible_by"] = 384  # words count, those that only fill up, too
    stock = Job(corpus, way, STOCK_ON_DOCUMENTS)
    first, saved = tmp_path / "first", tmp_path / "saved"
    stock.train(**one, save=first, save_interval=1, exit_interval=1)
    # A run that resumes Megatron's has one stage a rank; one that begins chooses.
    weights = {"load": first, "finetune": placement is None or None}
    whole = stock.train(**one, **weights)
    ours = Job(corpus, way, HYBRID_PROGRAM if "hybrid_layer_pattern" in more else PROGRAM)
    how = {"epp": True, "epp_placement": placement, "epp_cost_model": None,
           "save": saved, "save_interval": 9}  # fmt: skip
    begun = ours.train(**how, **weights, exit_interval=3)
    assert "measured this device in" in begun.output
    resumed = ours.train(**how, load=saved)
    assert "measured this device in" not in resumed.output
    if placement is None:
        several = r"--epp-placement auto: stages on ranks \d( \d){3,}, layers .*"
        for run, why in ((begun, "% less time"), (resumed, "the checkpoint's, as it resumes")):
            assert re.search(several + why, run.output), run.output
    # Of the second iteration of a run Megatron's log shows the mean with the first.
    *others, fourth, fifth = whole.losses
    losses = [*begun.losses, *resumed.losses]
    assert losses == pytest.approx([*others, fourth, (fourth + fifth) / 2], rel=2e-6)
    assert [*begun.grad_norms, *resumed.grad_norms] == pytest.approx(whole.grad_norms, abs=2e-3)


@dataclass
class Stage:
    """Notes behind which other a stage's reductions start."""

    after: Any = field(default=None)

    def reduce_after(self, other: Any) -> None:
        self.after = other


@pytest.mark.parametrize(
    ("ran", "after"),
    [
        ("F0 F3 B3 B0", {0: None, 3: None}),
        ("F0 F3 I3 B0 W3", {0: 3, 3: None}),  # the last stage's W comes last
        ("F0 F2 F4 I4 I2 W2 B0 W4", {0: 4, 2: 4, 4: None}),
        ("F0 F2 F4 I4 W4 I2 B0 W2", {0: 2, 2: None, 4: None}),
    ],
)
def test_reductions_start_in_the_order_of_stages(ran: str, after: dict[int, int | None]) -> None:
    """Each letter and stage of chunk 0."""
    stages: dict[int, Any] = {stage: Stage() for stage in after}
    reduce_in_turn(stages, [(int(op[1:]), Op.parse(f"{op[0]}0")) for op in ran.split()])
    waits = {stage: None if of is None else stages[of] for stage, of in after.items()}
    assert all(one.after is waits[stage] for stage, one in stages.items())


def test_optimizer_states_of_other_stages_are_refused(tmp_path: Path) -> None:
    """Saved by rank, of stages of the same sizes that lie otherwise: of them Megatron sees nothing.
    Saved by parameter they load (above)."""
    corpus = write_corpus(tmp_path / "corpus", [65] * 24)
    saved = tmp_path / "saved"
    how = {"epp": True, "use_distributed_optimizer": True, "lr_decay_style": "constant"}
    save = {"save": saved, "save_interval": 1, "exit_interval": 1}
    how["train_iters"] = 2
    trained(flags(corpus, **how, epp_placement="interleaved 2", **save))
    how["load"] = saved
    same = trained(flags(corpus, **how, epp_placement="place 0 1 0 1 layers 1 1 1 1"))
    assert len(same.losses) == 1
    refused(
        flags(corpus, **how, epp_placement="place 0 0 1 1"),
        "--load",
        "saved without --dist-ckpt-optim-fully-reshardable, belong to stages on ranks 0 1 0 1 with "
        "layers 1 1 1 1, ",
        "; this run has stages on ranks 0 0 1 1 with layers 1 1 1 1, ",
        processes=2,
    )
    fresh = trained(flags(corpus, **how, epp_placement="place 0 0 1 1", no_load_optim=True))
    assert len(fresh.losses) == 1
