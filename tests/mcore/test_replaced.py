"""Flags whose job a plan does: taken out with one warning; the results are the same."""

import argparse
import sys

import pytest

from megatron_epp.mcore.flags import replaced
from megatron_epp.mcore.flags.replaced import REPLACED, TAKEN
from megatron_epp.mcore.kinds.registry import replaced_by_kinds
from tests.mcore.runs import Run, flags, train

# But SEGMENTS, of texts that are read.
ROWS = (*REPLACED, *(one for one in replaced_by_kinds() if not one.untyped))
# Values that no parser can tell.
VALUES = {
    "recompute_modules": "core_attn mlp",
    "cuda_graph_modules": "attn mlp",
    "cuda_graph_scope_deprecated": "full",
    "tp_comm_overlap_cfg": "overlap.yaml",
    "offload_modules": "core_attn",
    "moe_token_dispatcher_type": "flex",
    "cp_comm_type": "a2a",
}


@pytest.fixture(scope="module")
def typed() -> dict[str, str]:
    """Every flag of the table with a value that is not its default, as a user types it."""
    from megatron.training.arguments import add_megatron_arguments

    from megatron_epp.mcore.job.read_flags import prepare_parser

    parser = prepare_parser(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    actions = {action.dest: action for action in parser._actions}

    def words(name: str) -> str:
        action = actions[name]
        if action.nargs == 0:
            return action.option_strings[-1]
        others = [one for one in action.choices or () if one != action.default]
        value = VALUES.get(name) or (others[0] if others else 0.5 if action.type is float else 2)
        return f"{action.option_strings[-1]} {value}"

    return {name: words(name) for row in ROWS for name in row.names.split() if name in actions}


@pytest.fixture
def parsed(monkeypatch):
    """What Megatron's parser and ours make of words, as the entry has them read."""
    from megatron.training.arguments import parse_args

    from megatron_epp.mcore.flags.config import elastic_defaults
    from megatron_epp.mcore.job.read_flags import prepare_parser

    def parse(*words: str) -> argparse.Namespace:
        def prepare(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            parser = prepare_parser(parser)
            if "--epp" in words:
                parser.set_defaults(**elastic_defaults(parser.parse_args([])))
            return parser

        dropout = () if "--attention-dropout" in words else ("--attention-dropout", "0")
        monkeypatch.setattr(sys, "argv", ["pretrain", *words, *dropout])
        return parse_args(prepare)

    return parse


def test_each_is_set_back_and_named_as_it_was_typed(parsed, typed) -> None:
    assert VALUES.keys() <= typed.keys()
    assert sum(len(row.names.split()) for row in ROWS) == 64  # none is lost
    plain = parsed("--epp")
    assert replaced.warning(plain) is None
    words = [word for one in typed.values() for word in one.split()]
    args = parsed("--epp", *words)
    assert {name: getattr(args, name) for name in typed} == {
        name: getattr(plain, name) for name in typed
    } | {"moe_token_dispatcher_type": "alltoall"}
    said = replaced.warning(args)
    assert said is not None and "\n" not in said
    assert [one for one in typed.values() if one not in said] == []
    assert [one.by for one in ROWS if one.by not in said] == []
    # Checkpoints hold the arguments: nothing but words is among them.
    assert all(type(line) is str for line in getattr(args, TAKEN))


@pytest.mark.parametrize(
    ("degrees", "taken"),
    [
        ("--expert-model-parallel-size 2", True),
        # Inside a replica gathering is as good.
        ("--context-parallel-size 2 --expert-model-parallel-size 2", False),
        # Matrices of experts are split as others' are.
        ("--tensor-model-parallel-size 2 --expert-model-parallel-size 2", True),
        (
            "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 "
            "--expert-tensor-parallel-size 1",
            False,
        ),
    ],
)
def test_replicas_do_not_gather_rows_which_is_megatrons_default(parsed, degrees, taken) -> None:
    experts = "--num-experts 4"
    args = parsed("--epp", *experts.split(), *degrees.split())
    assert args.moe_token_dispatcher_type == ("alltoall" if taken else "allgather")
    said = replaced.warning(args)
    assert (said is not None and "--moe-token-dispatcher-type allgather (" in said) == taken
    assert parsed("--epp", *degrees.split()).moe_token_dispatcher_type == "allgather"


@pytest.mark.parametrize(
    ("words", "becomes"),
    [
        ("--pipeline-model-parallel-layout Et|(tt|)*2tmL", {"layout": "Ettt|tttmL"}),
        ("--pipeline-model-parallel-layout E|t,|t|L", {"layout": "Et|tL"}),
        ("--hybrid-layer-pattern *-|*|M-|M/*-/*-", {"layer": "*-*|M-M/*-/*-"}),
        ("--hybrid-override-pattern *|-|*|-|*|-", {"override": "*-*|-*-"}),
    ],
)
def test_segments_of_a_stage_become_one(parsed, words, becomes) -> None:
    """Layers stay in their order, embedding and output layer at its ends."""
    name, stages = "--pipeline-model-parallel-size", "2"
    one = "--epp-placement", "even"
    args = parsed("--epp", *one, name, stages, *words.split())
    placed = {
        "layout": args.pipeline_model_parallel_layout,
        "layer": args.hybrid_layer_pattern,
        "override": args.hybrid_override_pattern,
    }
    assert {what: text for what, text in placed.items() if text is not None} == becomes
    assert f"no effect: {words} (a stage computes" in (replaced.warning(args) or "")


@pytest.mark.parametrize(
    "words",
    [
        "--pipeline-model-parallel-layout Et|tL",
        "--pipeline-model-parallel-layout Et|t|tL",  # which Megatron refuses
        "--hybrid-layer-pattern *-|*-/*",
        "--hybrid-layer-pattern *-*-",
        "--hybrid-layer-pattern *|-|*",
    ],
)
def test_segments_that_are_stages_or_do_not_divide_are_left(parsed, words) -> None:
    args = parsed("--epp", "--pipeline-model-parallel-size", "2", *words.split())
    assert replaced.warning(args) is None
    assert words.split()[1] in (args.pipeline_model_parallel_layout, args.hybrid_layer_pattern)


def test_a_layout_that_is_none_is_one_line(parsed) -> None:
    with pytest.raises(ValueError, match=r"^--pipeline-model-parallel-layout Ex\|tL: Invalid"):
        parsed("--epp", "--pipeline-model-parallel-layout", "Ex|tL")


def test_dropout_in_attention_is_megatrons_default_alone(parsed, parse) -> None:
    """Nobody asked for it; who asks is refused."""
    assert parsed("--epp", "--attention-dropout", "0.1").attention_dropout == 0.1
    args = parse("--epp")
    said = replaced.warning(args)
    assert args.attention_dropout == 0 and said is not None
    assert "--attention-dropout 0.1 (if not given, 0 replaces Megatron's default, " in said
    assert parse().attention_dropout == 0.1


def test_without_epp_they_are_megatrons(parsed) -> None:
    args = parsed("--recompute-granularity", "full", "--micro-batch-size", "3")
    assert (args.recompute_granularity, args.micro_batch_size) == ("full", 3)
    assert not hasattr(args, TAKEN)
    assert not parsed().calculate_per_token_loss  # as Megatron has it by default


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        # Where tokens are masked, a mean of micro-batches weighs them differently.
        ("--no-calculate-per-token-loss --eod-mask-loss", {"calculate_per_token_loss": False}),
        # Another order of the documents.
        ("--dataloader-type cyclic", {"dataloader_type": "cyclic"}),
    ],
)
def test_what_would_change_results_is_left_for_a_refusal(parsed, words, kept) -> None:
    args = parsed("--epp", *words.split())
    assert replaced.warning(args) is None
    assert {name: getattr(args, name) for name in kept} == kept


# ------------------------------------------------------------------ whole runs


LENGTHS = [30, 40, 50, 60] * 5


def warnings(run: Run) -> list[str]:
    return [line for line in run.output.splitlines() if "these flags have no effect" in line]


def test_a_run_with_all_of_them_is_the_run_without(corpus, typed) -> None:
    """Through the command line, in one run: two of them are other ways to say a third."""
    plain = flags(corpus, pipeline_model_parallel_size=1, train_iters=1, epp=True)
    left_out = ("recompute_activations", "num_virtual_stages_per_pipeline_rank")
    words = [word for name, one in typed.items() if name not in left_out for word in one.split()]
    with_all, without = train([*plain, *words], processes=1), train(plain, processes=1)
    assert with_all.status == without.status == 0, with_all.output
    assert warnings(without) == [] and len(warnings(with_all)) == 1
    assert "--recompute-granularity full, --recompute-method uniform" in warnings(with_all)[0]
    assert len(with_all.losses) == 1
    assert with_all.losses == without.losses
    assert with_all.grad_norms == without.grad_norms
