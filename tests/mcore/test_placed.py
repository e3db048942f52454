"""Several stages on a rank: what the plain model computes, whatever the placement."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import GPT, LLAMA, Trial, read
from megatron_epp.ir import Kind, Message, Op, Plan, Step, Transfer, parse_records
from megatron_epp.mcore.certify.model_flags import parsed
from megatron_epp.mcore.choose.kept import CHOICES_FILE
from megatron_epp.mcore.flags.replaced import TAKEN
from megatron_epp.mcore.model.stage import reduce_in_turn
from megatron_epp.mcore.placing.placeholder import placeholder
from megatron_epp.mcore.placing.requested import PLACE, STAGE_LAYERS
from megatron_epp.sim.play import play
from tests.certify.planned import PlansOf
from tests.certify.trial import CheckedTrial, read_checked
from tests.mcore.certified import certified
from tests.mcore.models import TRAINED_MOE, TRAINED_SSM
from tests.mcore.resumes import OPTIMIZER, STOCK_ON_DOCUMENTS, Job
from tests.mcore.runs import PROGRAM, flags, train, trained, write_corpus
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
    lines, judged = certified(Trial(Degrees(pp=2, tp=1, dp=2), models, batches=6, overlap=True))
    assert sum("stages on ranks 1 0 0 1" in line for line in lines) == 2
    for kind in ("split", "hybrid", "packed", "halved", "offloaded"):
        assert sum(getattr(batch.coverage, kind) for batch in judged) > 0
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
    _, judged = certified(trial)
    kept = "halved" if planner == "zb-v" else "split"
    assert sum(getattr(batch.coverage, kept) for batch in judged) > 0
    other = "split" if planner == "zb-v" else "halved"
    assert sum(getattr(batch.coverage, other) for batch in judged) == 0


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
        how: dict[str, object] = {"micro_batch_size": 1, "calculate_per_token_loss": True,
                                  "dataloader_type": "single"}  # fmt: skip
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
    one = {"processes": 1, "pipeline_model_parallel_size": 1, "micro_batch_size": 1,
           "calculate_per_token_loss": True, "dataloader_type": "single"}  # fmt: skip
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


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"epp-placement": "place 0 1 1 0"}, "the last stage, 3, is on rank 0; expected rank 1, "
         "from which Megatron takes the loss: rank 0: 0 3 | rank 1: 1 2"),
        ({"epp-placement": "flags"}, "--epp-placement flags: No such file or directory; expected e"
         "ven, v, interleaved N, auto (which also heeds Megatron's flags of virtual stages), or a"),
        ({"epp-placement": "interleaved 9"}, "18 stages for 4 layers"),
        ({"epp-placement": "v", "decoder-first-pipeline-num-layers": 1}, "says how many layers"),
    ],
)  # fmt: skip
def test_what_cannot_be_placed_is_refused_in_one_line(
    more: dict, said: str, tmp_path: Path
) -> None:
    words = flags(tmp_path / "corpus", epp=True, **more)
    with pytest.raises(ValueError) as caught:
        placeholder(parsed([word for word in words if word != "--epp"], 2))
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("more", "place", "layers"),
    [
        ({"num-virtual-stages-per-pipeline-rank": 2}, [0, 1, 0, 1], [1, 1, 1, 1]),
        ({"num-layers-per-virtual-pipeline-stage": 1}, [0, 1, 0, 1], [1, 1, 1, 1]),
        ({"num-layers-per-virtual-pipeline-stage": 2}, None, None),  # one stage a rank
        ({"num-layers": 5, "pipeline-model-parallel-layout": "Et|tt|t|tL"}, [0, 1, 0, 1],
         [1, 2, 1, 1]),
        ({"pipeline-model-parallel-layout": "Et|tttL"}, None, None),
        ({"hybrid-layer-pattern": "*-|*|-|-"}, [0, 1, 0, 1], [2, 1, 1, 1]),
        ({}, None, None),
    ],
)  # fmt: skip
def test_megatrons_flags_of_virtual_stages_mean_a_placement(
    more: dict, place: list | None, layers: list | None, tmp_path: Path
) -> None:
    """By default; with a named placement they are in the one warning."""
    for asked in (True, False):
        given = {"epp-placement": "auto"} if asked else {}
        words = flags(tmp_path / "corpus", epp=True, **given, **more)
        args = parsed([word for word in words if word != "--epp"], 2)
        values = placeholder(args)
        assert values.get(PLACE) == (place if asked else None)
        assert values.get(STAGE_LAYERS) == (layers if asked else None)
        named = any("virtual" in line or "segments" in line for line in getattr(args, TAKEN))
        virtual = bool(more) and "Et|tttL" not in more.values()
        assert named == (virtual and not asked)


def test_words_are_padded_for_all_stages(tmp_path: Path) -> None:
    more = {"epp-placement": "interleaved 3", "num-layers": 6, "epp-vocab-parallel": "on"}
    words = flags(tmp_path / "corpus", **more)
    args = parsed(words, 2)
    assert placeholder(args)["make_vocab_size_divisible_by"] == 3 * 128
    args.epp_vocab_parallel = "off"
    assert "make_vocab_size_divisible_by" not in placeholder(args)


def test_a_placement_is_chosen_by_lengths_and_kept(tmp_path: Path) -> None:
    """Packed, four micro-batches: two stages on a rank fill and drain the pipeline sooner. The run
    that goes on takes the checkpoint's. Two layers make no four stages, which is said."""
    corpus = write_corpus(tmp_path / "corpus", [129] * 64)
    way = {"epp": True, "epp-planner": "packing", "epp-placement": None, "seq-length": 128,
           "override-opt-param-scheduler": True, "lr-decay-style": "constant"}  # fmt: skip
    kept = tmp_path / "kept"
    first = trained(
        flags(corpus, **way, global_batch_size=4, train_iters=2, save=kept, save_interval=2)
    )
    said = next(line for line in first.output.splitlines() if "--epp-placement auto" in line)
    assert "stages on ranks" in said and "% less time" in said and "(simulated)" in said
    place = json.loads((kept / CHOICES_FILE).read_text())[PLACE]
    assert (
        len(place) == 4
        and f"ranks {' '.join(map(str, place))}, layers 1 1 1 1 of the stages;" in said
    )
    again = train(flags(corpus, **way, global_batch_size=4, train_iters=3, load=kept))
    assert again.status == 0 and len(again.losses) == 1, again.output
    assert f"stages on ranks {' '.join(map(str, place))}" in again.output
    assert "the checkpoint's, as it resumes" in again.output
    two = train(flags(corpus, **way, num_layers=2, train_iters=1))
    assert two.status == 0 and len(two.losses) == 1, two.output
    assert "--epp-placement auto: stages on ranks 0 1, layers 1 1 of the stages;" in two.output
    assert "layers 1 1 of the stages; no other can run by" in two.output
