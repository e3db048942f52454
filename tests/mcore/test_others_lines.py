"""Command lines of others, scaled down: they start and train with --epp as they stand.

Written after ms-swift's and Megatron-LM's own dense examples (docs/reference/versions.md):
sizes and data are ours, flags of the frameworks' own left out, and what a host without a GPU cannot
do (fp8, fused kernels). Flags of the pipeline, of memory and of parallelism are as there.
"""

from pathlib import Path

import pytest

from tests.mcore.runs import PROGRAM, Run, trained

pytestmark = pytest.mark.everything

ITERATIONS = 3
DATA = (
    "--tokenizer-type NullTokenizer --vocab-size 127 --seq-length 128 --split 100,0,0 "
    "--log-interval 1 --epp"
)
SMALL = (
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 "
    "--group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm "
    "--disable-bias-linear"
)
LINES = {
    # Qwen3-32B, full parameters; spelt there with underscores and `true`.
    "ms-swift dense": f"{SMALL} --qk-layernorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --max-position-embeddings 128 --bf16 "
    "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 1 "
    "--global-batch-size 16 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 --finetune --cross-entropy-loss-fusion --lr 1e-5 --min-lr 1e-6 "
    "--lr-warmup-fraction 0.05 --attention-backend flash --no-save-optim --no-save-rng "
    "--no-calculate-per-token-loss --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 "
    f"--train-iters {ITERATIONS}",
    # Megatron-LM, Llama 3 8B.
    "Megatron-LM llama3": f"{SMALL} --use-mcore-models --kv-channels 8 "
    "--max-position-embeddings 128 --position-embedding-type rope --rotary-base 1000000 "
    "--rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.0134 "
    "--attention-backend fused --untie-embeddings-and-output-weights --micro-batch-size 1 "
    f"--global-batch-size 8 --train-samples {8 * ITERATIONS} --lr-decay-samples 20 "
    "--lr-warmup-samples 2 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 "
    "--decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 "
    "--adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion "
    "--calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 "
    "--exit-duration-in-mins 235 --tensor-model-parallel-size 1 --context-parallel-size 1 "
    "--sequence-parallel --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather --no-create-attention-mask-in-dataloader --no-mmap-bin-files "
    "--num-workers 1 --eval-iters 0 --eval-interval 100 --log-throughput "
    "--distributed-timeout-minutes 60",
}
# What the warning of each names, where there is one.
NAMED = {
    "ms-swift dense": (
        "--recompute-granularity full, --recompute-method uniform, --recompute-num-layers 1",
        "--no-calculate-per-token-loss",
    )
}


LENGTHS = [30, 128, 50, 100, 20, 60] * 8


def train_line(line: str, corpus: Path, program: tuple[str, ...] = PROGRAM) -> Run:
    run = trained([*line.split(), *DATA.split(), "--data-path", str(corpus)], program=program)
    assert len(run.losses) == ITERATIONS and all(2 < loss < 7 for loss in run.losses)
    return run


@pytest.mark.parametrize("name", LINES)
def test_command_lines_of_others_start_and_train(corpus, name: str) -> None:
    run = train_line(f"{LINES[name]} --epp-cost-model analytic", corpus)
    said = [line for line in run.output.splitlines() if "these flags have no effect" in line]
    assert len(said) == (name in NAMED)
    assert [flags for flags in NAMED.get(name, ()) if flags not in said[0]] == []


def test_adapters_on_a_frozen_model_train(corpus) -> None:
    """ms-swift's LoRA example: all linears, with recompute, one micro-batch of everything. The cost
    model is measured on the model as it is."""
    line = (
        f"{SMALL} --position-embedding-type rope --max-position-embeddings 128 "
        "--pipeline-model-parallel-size 2 --micro-batch-size 16 --global-batch-size 16 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        "--finetune --lr 1e-2 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 "
        f"--train-iters {ITERATIONS} --use-distributed-optimizer --overlap-grad-reduce"
    )
    run = train_line(line, corpus, (__file__,))
    assert "--micro-batch-size 16" in run.output


def main() -> None:
    """``pretrain_gpt`` of a frozen model that gets adapters before --epp's hooks see it."""
    from megatron_epp.mcore.certify.adapters import adapt
    from megatron_epp.mcore.trainer import entry
    from megatron_epp.mcore.trainer.hooks import TrainerHooks

    entry.main(hooks=TrainerHooks(pre_wrap=lambda models: [adapt(one, 4) for one in models]))


if __name__ == "__main__":
    main()
