"""Layers with a state under ``--epp``: certified, broken on purpose, trained, refused."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_epp.certify.batches import Frame, draw, letters_drawn
from megatron_epp.certify.command import BatchVerdict
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import LLAMA, Trial
from megatron_epp.ir import slices_of
from megatron_epp.layers.recompute.wrap import EXECUTABLE
from tests.mcore.certified import certified
from tests.mcore.resumes import Job, require_megatrons_own_numbers
from tests.mcore.runs import write_corpus
from tests.mcore.sabotages import first_seed, judged_alone, require_shown

PROGRAM = ("-m", "megatron_epp.pretrain_hybrid")

SABOTAGE = Path(__file__).with_name("sabotage_states.py")
EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3 "
    "--moe-token-dispatcher-type alltoall --expert-tensor-parallel-size 1 "
)
MAMBA = "--mamba-num-heads 32 --mamba-num-groups 8 "
# Qwen3-Next's shape: every fourth layer has attention, its outputs gated.
DELTA = (
    f"{EXPERTS} --qk-layernorm --apply-layernorm-1p --attention-output-gate --kv-channels 128 "
    "--moe-shared-expert-intermediate-size 256 --moe-shared-expert-gate --rotary-percent 0.25 "
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --num-layers 8 "
    "--linear-num-key-heads 16 --linear-num-value-heads 32 "
)


def hybrid(pattern: str, others: str = "") -> tuple[tuple[str, ...], ...]:
    return ((*f"{LLAMA} {MAMBA} {others}".split(), f"--hybrid-layer-pattern={pattern}"),)


EVERY_DEGREE = {
    "stages": Trial(Degrees(pp=2, tp=1, dp=1), hybrid("M*-GM|GM-*M"), batches=4, overlap=True),
    "tensor-parallel ranks": Trial(
        Degrees(pp=1, tp=2, dp=1), hybrid("MEG*M", f"{EXPERTS} --sequence-parallel"), batches=3
    ),
    "context-parallel ranks": Trial(Degrees(pp=1, tp=1, dp=1, cp=2), hybrid("MG*-M"), batches=4),
    # In turn with torch's rule and convolution, which know one sequence a call.
    "a GPTModel": Trial(
        Degrees(pp=2, tp=1, dp=1),
        tuple((*f"{LLAMA} {DELTA} {rule}".split(),) for rule in ("", "--deterministic-mode")),
        batches=4,
    ),
}


@pytest.mark.parametrize("name", EVERY_DEGREE)
def test_random_plans_compute_what_the_plain_model_computes(name) -> None:
    _, judged = certified(EVERY_DEGREE[name])
    for what in ("packed", "cut"):
        assert sum(getattr(batch.coverage, what) for batch in judged) > 0, what


# ------------------------------------------------------------------ broken on purpose

WAYS = (
    "nothing",
    "forget the rows in front",
    "forget the state",
    "lose the states gradient",
    "lose the rows gradient",
    "let time pass in front",
    "begin in the middle of a call",
    "run over documents",
    "nothing, in short calls",
)
FRAME = Frame(61, (4,), replicas=1, letters=letters_drawn(EXECUTABLE), splits=True)


def fragile(number: int, seed: int) -> bool:
    """Whether a document of the batch is cut; where a call or a document begins wrongly, also
    behind another in a chunk, with targets."""
    drawn = draw(seed, number, FRAME)
    (plan,), (deal,) = drawn.step.plans, drawn.step.deals
    behind = [
        span
        for chunk in plan.chunks
        for span in chunk.spans[1:]
        if drawn.loss_masks[deal[span.document]][span.start : span.stop].any()
    ]
    if WAYS[number] == "begin in the middle of a call":
        return any(span.start > 0 for span in behind)
    if WAYS[number] == "run over documents":
        return bool(behind)
    return max(slices_of(plan).later) >= 0


@pytest.fixture(scope="module")
def judged() -> Mapping[str, BatchVerdict]:
    ((*model,),) = hybrid("MM-M")
    return judged_alone(" ".join(model), WAYS, first_seed(len(WAYS), fragile), SABOTAGE)


@pytest.mark.parametrize("way", WAYS)
def test_wrong_states_show_and_right_ones_pass(judged, way) -> None:
    require_shown(judged[way], way)


# ------------------------------------------------------------------ trained

MODEL = {
    "hybrid_layer_pattern": "M*G-",
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
    "mamba_state_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def test_equal_documents_give_megatrons_own_numbers(tmp_path) -> None:
    model = {**MODEL, "pipeline_model_parallel_size": 1}
    require_megatrons_own_numbers(tmp_path, model, program=PROGRAM)


def test_documents_of_any_length_train_over_stages(tmp_path) -> None:
    corpus = write_corpus(tmp_path / "documents", [400, 3, 40, 512, 9, 130])
    lengths = {"seq_length": 512, "max_position_embeddings": 512}
    run = Job(corpus, MODEL, PROGRAM).train(epp=True, **lengths)
    assert len(run.losses) == 3
