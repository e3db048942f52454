"""--epp-placement and --epp-vocab-parallel auto, the default: what they take where plans do not
decide, in one line each."""

import json
import re
import sys
from argparse import Namespace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_epp.cost.build import named_cost
from megatron_epp.ir.placement import EVENLY
from megatron_epp.ir.random_plan import arbitrary_plan
from megatron_epp.mcore.certify.model_flags import parsed
from megatron_epp.mcore.choose import choices, faster, from_rank_0, layouts
from megatron_epp.mcore.choose.choices import choose_stages
from megatron_epp.mcore.choose.kept import CHOICES_FILE, TRACKER, keep_choices, kept_placement
from megatron_epp.mcore.flags.config import Config
from megatron_epp.mcore.flags.replaced import warning
from megatron_epp.mcore.job.job_cost import analytic
from megatron_epp.mcore.job.read_flags import prepare_parser
from megatron_epp.mcore.model.shape import placement_of
from megatron_epp.mcore.placing.placeholder import placeholder
from megatron_epp.mcore.placing.requested import PLACE, STAGE_LAYERS
from megatron_epp.planner.choose import FIRST_BATCHES
from megatron_epp.planner.choose import choice as choices_by_time
from megatron_epp.planner.options import Options
from tests.mcore.runs import write_documents

MODEL = """
    --num-layers 6 --hidden-size 32 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --epp-placement auto --epp-cost-model analytic
"""
V = {PLACE: [1, 0, 0, 1], STAGE_LAYERS: [1, 2, 2, 1]}
UNKNOWN = "what other stages save is not known: "
UNSAVED = "what it saves is not known: "


def validated(words: str = "", **changes: Any) -> Namespace:
    """The flags of a job on two pipeline ranks, with what Megatron's validation adds."""
    args = parsed((MODEL + words).split(), 2)
    filled = {"padded_vocab_size": 128, "data_parallel_size": 1, "kv_channels": 8}
    filled |= {"calculate_per_token_loss": True, "dataloader_type": "external"}
    filled |= {"attention_dropout": 0.0, "ffn_hidden_size": 128, "num_query_groups": 4}
    filled |= {"expert_tensor_parallel_size": 1, "params_dtype": torch.bfloat16}
    filled |= placeholder(args)
    vars(args).update(filled | changes)
    return args


def test_it_is_the_default() -> None:
    assert Config().epp_placement == "auto"


OF_PLANS = "as the plans of --epp-plan have it"
OF_CHECKPOINT = "the checkpoint's, as it resumes"
ANEW = "chosen anew, as the checkpoint's run had another layout"
EVEN, OF_V = "0 1, layers 3 3", "1 0 0 1, layers 2 1 1 2"


@pytest.mark.parametrize(
    ("changes", "vocabulary", "stages", "said"),
    [
        ({}, f"off; {UNSAVED}no --data-path", EVEN, f"{UNKNOWN}no --data-path, so no lengths"),
        ({"mock_data": True}, f"off; {UNSAVED}lengths are", EVEN,
         f"{UNKNOWN}lengths are read from"),
        ({"num_layers": 7}, "off; ", "0 1, layers 4 3", UNKNOWN),
        ({"items": print}, "off; no lengths are known of documents from Python", EVEN,
         "no lengths are known of documents from Python"),
        ({"pre_wrap": print}, "off; a script changes the model before it is wr", EVEN, UNKNOWN),
        ({"padded_vocab_size": 129}, "off; 129 words, padded, do not divide over", EVEN, UNKNOWN),
        ({"use_mup": True}, "off; it does not run scaled logits (--use-mup)", EVEN, UNKNOWN),
        ({"num_experts": 4, "expert_model_parallel_size": 2}, "off; experts are sharded", EVEN,
         UNKNOWN),
        ({"mtp_detach_heads": True}, "off; --epp does not run MTP losses without", EVEN, UNKNOWN),
        ({"save": "x", "ckpt_format": "zarr"}, "off; --ckpt-format zarr cannot save the LM head",
         EVEN, "--ckpt-format zarr is for one"),
        ({"epp_planner": "zb-v"}, "off; ", "1 0 0 1, layers 2 2 1 1", UNKNOWN),
        ({"epp_plan": "v.plan"}, f"off; {OF_PLANS}", OF_V, OF_PLANS),
        ({"epp_plan": "cut.plan"}, f"on; {OF_PLANS}", EVEN, OF_PLANS),
        ({"epp_cost_model": "none.json"}, "off; ", EVEN, f"{UNKNOWN}profile file none.json: No "),
        ({"load": "v"}, f"off; {OF_CHECKPOINT}", "1 0 0 1, layers 1 2 2 1",
         f"{OF_CHECKPOINT} (kept next to it)"),
        ({"load": "v", "epp_plan": "v.plan"}, f"off; {OF_PLANS}", OF_V, OF_PLANS),
        ({"load": "on"}, f"on; {OF_CHECKPOINT}", EVEN, f"{OF_CHECKPOINT} (its flags made it even"),
        ({"load": "megatron"}, f"off; {OF_CHECKPOINT}", EVEN, f"{OF_CHECKPOINT} (its flags made"),
        ({"load": "v", "num_layers": 8}, f"off; {OF_CHECKPOINT}", "0 1, layers 4 4", ANEW),
        ({"load": "four"}, "off; ", EVEN, ANEW),
        ({"load": "on", "finetune": True}, f"off; {UNSAVED}no --data-path", EVEN, UNKNOWN),
    ],
)  # fmt: skip
def test_what_plans_do_not_decide_is_one_line(
    changes: dict, vocabulary: str, stages: str, said: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    of_v = arbitrary_plan([30, 5], (2, 1, 1, 2), Random(0), place=(1, 0, 0, 1))
    Path("v.plan").write_text(str(of_v))
    cut = arbitrary_plan([30, 5], (3, 3), Random(0), vocabulary_parallel=True)
    Path("cut.plan").write_text(str(cut))
    four = {PLACE: [0, 1, 2, 3], STAGE_LAYERS: [1, 2, 2, 1]}
    on = {"epp_vocab_parallel": "on", "epp_blend": "tokens"}
    for name, kept in (("v", V), ("on", on), ("megatron", None), ("four", four)):
        Path(name).mkdir()
        Path(name, TRACKER).write_text("3")
        if kept is not None:
            Path(name, CHOICES_FILE).write_text(json.dumps(kept))
    # As if on a device: on a CPU the output layer is never over the stages.
    monkeypatch.setattr("megatron_epp.planner.choose.choice.is_of_cpu", lambda profile: False)
    args = validated(epp_vocab_parallel="auto", **changes)
    parts = SimpleNamespace(pre_wrap=changes.get("pre_wrap"), items=changes.get("items"))
    of_vocabulary, line = choose_stages(args, parts)
    assert of_vocabulary.startswith(f"--epp-vocab-parallel auto: {vocabulary}")
    assert args.epp_vocab_parallel == vocabulary.split(";")[0]
    assert line.startswith(f"--epp-placement auto: stages on ranks {stages} of the stages; {said}")
    assert "\n" not in of_vocabulary + line
    chosen = placement_of(args)
    assert f"{chosen}, layers {' '.join(map(str, chosen.layers))}" == stages
    even = stages.startswith("0 1,")
    assert args.epp_placement == (EVENLY if even else f"place {stages.replace(',', '')}")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epp_planner": "pakcing"}, "did you mean packing"),
        ({"epp_levers": "wsplti"}, "wsplti"),
        ({"epp_plan": "other.plan"}, "--epp-plan other.plan: the plan has stages on ranks 0 1, "
         "layers 1 1 of the stages; this job has 6 layers on 2 pipeline ranks"),
        ({"epp_plan": "none.plan"}, "--epp-plan none.plan"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_in_one_line(
    changes: dict, said: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.plan").write_text(str(arbitrary_plan([30, 5], (1, 1), Random(0))))
    with pytest.raises(ValueError, match=re.escape(said)) as refusal:
        choose_stages(validated(**changes))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("words", "place", "layers", "why"),
    [
        ("--decoder-first-pipeline-num-layers 4", "0 1", "4 2", "--decoder-first-pipeline-num-lay"),
        ("--pipeline-model-parallel-layout Et|t*5L", "0 1", "1 5", "--pipeline-model-parallel-l"),
        ("--pipeline-model-parallel-layout Et|t|tt|ttL", "0 1 0 1", "1 1 2 2", "--pipeline-model"),
        ("--num-virtual-stages-per-pipeline-rank 3", "0 1 0 1 0 1", "1 1 1 1 1 1", "--num-virtual"),
        ("--num-layers-per-virtual-pipeline-stage 3", "0 1", "3 3", "--num-layers-per-virtual-pi"),
        ("--hybrid-layer-pattern *-|*|-|-*", "0 1 0 1", "2 1 1 2", "| in --hybrid-layer-patt"),
        # What describes no placement means one stage a rank.
        ("--num-layers-per-virtual-pipeline-stage 2", "0 1", "3 3", "--num-layers-per-virtual-pi"
         "peline-stage 2: 6 layers on 2 pipeline ranks; expected a divisor of 3, the layers of a"),
        ("--pipeline-model-parallel-layout Et|t|t|t*3|L|", "0 1", "3 3", "Et|t|t|t*3|L| has 6 seg"
         "ments for 2 pipeline ranks; expected as many for each, with a layer in every one"),
        ("--num-virtual-stages-per-pipeline-rank 2 --decoder-last-pipeline-num-layers 2",
         "0 1", "4 2", "--epp-placement interleaved 2: --decoder-last-pipeline-num-layers says"),
    ],
)  # fmt: skip
def test_flags_that_place_layers_precede_it(words: str, place: str, layers: str, why: str) -> None:
    args = validated(words, epp_vocab_parallel="off")
    assert args.epp_placement != "auto"
    (line,) = choose_stages(args)
    where = f"stages on ranks {place}, layers {layers} of the stages"
    assert line.startswith(f"--epp-placement auto: {where}; {why}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("v --decoder-first-pipeline-num-layers 4", "-placement v: .* says how many layers each"),
        ("v --pipeline-model-parallel-layout Et|tL", "-placement v: .* says how many layers each"),
        ("interleaved 4", "8 stages for 6 layers; .*; auto chooses among the pla"),
        ("place 0 1 1 0", "the last stage, 3, is on rank 0; expected rank 1, from which Megatron "
         r"takes the loss: rank 0: 0 3 \| rank 1: 1 2"),
        ("flags", "--epp-placement flags: No such file or directory; expected even, v, interleaved "
         r"N, auto \(which also heeds Megatron's flags of virtual stages\), or a"),
    ],
)  # fmt: skip
def test_a_named_placement_that_cannot_be_is_one_line(words: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refusal:
        validated(f"--epp-placement {words}")
    assert "\n" not in str(refusal.value)


def test_two_layers_on_two_ranks_have_one_placement(monkeypatch: Any) -> None:
    monkeypatch.setattr(choices, "first_batches", lambda args: [[64] * 8])
    (line,) = choose_stages(validated(num_layers=2, epp_vocab_parallel="off"))
    said = "stages on ranks 0 1, layers 1 1 of the stages; no other can run by"
    assert line.startswith(f"--epp-placement auto: {said}")


def test_stages_and_layouts_are_chosen_for_prefixes_that_are_computed_once(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """At the start, before it (--epp-layouts), and after measuring."""
    texts = [[*range(2, 52), n, 3, 5, 7, 9] for n in range(16)]
    corpus, chosen_for = write_documents(tmp_path / "corpus", texts), []

    def run_choice(cost: Any, batches: Any, *rest: Any, **how: Any) -> Any:
        chosen_for.append(batches)
        return real(cost, batches, *rest, **how)

    real = choices_by_time.run_choice
    monkeypatch.setattr(choices_by_time, "run_choice", run_choice)
    monkeypatch.setattr(layouts, "set_vocabulary_size", lambda args: None)
    seconds = []
    for least, once in ((0, ""), (16, "; shared prefixes computed once")):
        flags = {"data_path": [str(corpus)], "global_batch_size": 8, "epp_share_from": least}
        args = validated(**flags, epp_blend="tokens")
        seconds.append(layouts.predicted_seconds(args, layouts.AllowedLayout(pp=2)))
        line = choose_stages(args)[-1]
        assert line.startswith("--epp-placement auto: ") and line.endswith(f"(simulated{once})")
        args.epp_placement = "even"
        faster.faster_placement(args, analytic(args))
    whole, _, shared, after = chosen_for
    assert whole == [[54] * 8] * FIRST_BATCHES and after == shared[:1]
    assert [forest.tokens for forest in shared] == [49 + 8 * 5] * FIRST_BATCHES
    assert 1.5 * seconds[1] < seconds[0]


def test_layers_of_one_named_stage_a_rank_are_heard() -> None:
    args = validated("--epp-placement place 0 1 layers 2 4")
    assert placement_of(args).layers == (2, 4) and placement_of(args).is_even


def test_the_choice_takes_no_more_effort_than_plans() -> None:
    for effort in (None, 0):
        args = validated(epp_effort=effort)
        assert choices.cost_and_options(args, (3, 3))[1].effort == effort


def test_without_epp_or_stages_there_is_nothing_to_choose() -> None:
    for changes in ({"epp": False}, {"pipeline_model_parallel_size": 1}):
        args = validated(epp_vocab_parallel="auto", **changes)
        assert choose_stages(args) == [] and args.epp_vocab_parallel == "off"


def test_a_named_placement_is_kept_for_runs_that_resume(tmp_path: Path) -> None:
    args = validated("--epp-placement v", save=str(tmp_path))
    assert keep_choices(args, []) == []
    args = validated(load=str(tmp_path))
    (tmp_path / TRACKER).write_text("3")
    assert kept_placement(args) == placement_of(validated("--epp-placement v"))
    choose_stages(args)
    assert str(placement_of(args)) == "1 0 0 1"


def test_flags_of_virtual_stages_are_heard_without_a_warning(monkeypatch: Any) -> None:
    """Also when Megatron's parser reads them again, with the defaults that pass its checks."""
    from megatron.training.arguments import parse_args

    words = "--num-layers 5 --pipeline-model-parallel-layout Et|tt|t|tL --attention-dropout 0"
    first = parsed((MODEL + words).split(), 2)
    monkeypatch.setattr(sys, "argv", ["pretrain", *(MODEL + words).split(), "--epp"])

    def prepare(parser: Any) -> Any:
        parser = prepare_parser(parser)
        parser.set_defaults(pipeline_model_parallel_size=2, **placeholder(first))
        return parser

    args = parse_args(prepare)
    assert warning(args) is None
    assert args.epp_placement == "place 0 1 0 1 layers 1 2 1 1"
    assert args.pipeline_model_parallel_layout == "Et*2|t*3L"  # of the ranks


def test_vocabulary_parallelism_is_chosen_for_named_placements(monkeypatch: Any) -> None:
    cost, tried = named_cost("llama3-8b", "h100-80g", pp=2, tp=8), []

    def run_choice(*_: Any, vocabularies: Any, **__: Any) -> Any:
        tried.append(vocabularies)
        raise ValueError("enough")

    monkeypatch.setattr("megatron_epp.planner.choose.choice.run_choice", run_choice)
    monkeypatch.setattr(choices, "cost_and_options", lambda args, layers: (cost, None))
    monkeypatch.setattr(choices, "first_batches", lambda args: [[64] * 8])
    named = "--epp-placement interleaved 2", "--num-virtual-stages-per-pipeline-rank 2"
    for words in (*named, "--pipeline-model-parallel-layout Et|t*5L"):
        args = validated(words, num_layers=6)
        args.epp_vocab_parallel = "auto"
        choose_stages(args)
    assert tried == [[False, True]] * 2  # a layout has placed the output layer


class Store(dict):
    """Of torchrun's store, what rank 0 and the others call."""

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    set, get = dict.__setitem__, dict.__getitem__


def test_rank_0_decides_and_its_error_reaches_all(monkeypatch: Any) -> None:
    store, rank = Store(), [0]
    monkeypatch.setattr(from_rank_0, "start_store", lambda: store)
    monkeypatch.setattr(from_rank_0, "rank_of", lambda: (rank[0], 2))

    def on(number: int, what: str, make: Any) -> Any:
        rank[0] = number
        return from_rank_0.from_rank_0(what, make)

    assert on(0, "a", lambda: {"layers": (1, 2)}) == {"layers": (1, 2)}
    assert on(1, "a", None) == {"layers": [1, 2]}

    def fails(error: Exception) -> Any:
        raise error

    for number in (0, 1):
        with pytest.raises(ValueError, match="no such plan"):
            on(number, "b", lambda: fails(ValueError("no such plan")))
    with pytest.raises(KeyError):
        on(0, "c", lambda: fails(KeyError("a bug")))
    with pytest.raises(ValueError, match="c: rank 0 has failed"):
        on(1, "c", None)


def test_a_faster_placement_is_named_after_measuring(monkeypatch: Any) -> None:
    cost = named_cost("llama3-8b", "h100-80g", pp=2, tp=8)
    monkeypatch.setattr(faster, "first_batches", lambda args: [[8192] * 4, [0]])
    monkeypatch.setattr(faster, "cost_and_options", lambda *_: (cost, Options(8192)))
    args = validated("--epp-placement even --use-distributed-optimizer")
    line = faster.faster_placement(args, None)
    assert line is not None and "\n" not in line
    assert re.fullmatch(
        r"--epp-placement (v|'.*') takes \d+% less time by the measured cost model \(simulated\); "
        r"give it at a restart: with --dist-ckpt-optim-fully-reshardable, given now, checkpoints "
        r"load in it",
        line,
    )
    name = re.findall(r"--epp-placement '?(.*?)'? takes", line)[0]
    again = cost.replace(place=(), layers=cost.layout.layers)
    assert again.layout.placement.is_even and name != "even"
    monkeypatch.setattr(faster, "RESTART_PAYS", 0.9)
    assert faster.faster_placement(args, None) is None
    monkeypatch.setattr(faster, "first_batches", lambda args: int("unknown"))
    assert faster.faster_placement(args, None) is None
