#!/usr/bin/env python3
"""Certificates of Megatron-LM's own example configurations, with their original flags.

    scripts/upstream/model_recipes.py [NAME ...] [--pp 2] [--batches 2] [--list] [-o RESULT.md]

The flags are the model flags of the configurations in NVIDIA/Megatron-LM (commit d98e8a64 of
2026-08-22; the source of each is below). ``certify`` scales the models down and preserves their
structure. If the layers do not divide over the stages, ``certify`` must print one line that names
the necessary flags, and pass with these flags. The script prints a table; the exit status is 1 if a
configuration is not certified.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

MODELOPT = "examples/post_training/modelopt/conf"
_ALL = """
    --save-interval 100000 --micro-batch-size 1 --bf16 --no-masked-softmax-fusion --no-rope-fusion
    --use-mcore-models --tokenizer-type HuggingFaceTokenizer
"""
_QWEN3 = f"""{_ALL}
    --disable-bias-linear --position-embedding-type rope --normalization RMSNorm --swiglu
    --group-query-attention --kv-channels 128 --qk-layernorm --seq-length 4096
    --max-position-embeddings 40960 --make-vocab-size-divisible-by 1187 --rotary-percent 1.0
    --rotary-base 1000000 --no-bias-swiglu-fusion
"""
_QWEN3_MOE = f"""{_QWEN3}
    --untie-embeddings-and-output-weights --num-query-groups 4 --num-experts 128
    --moe-router-topk 8 --moe-router-dtype fp32 --moe-aux-loss-coeff 1e-3
    --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss
    --sequence-parallel
"""
_LLAMA3 = f"""{_ALL}
    --disable-bias-linear --use-rotary-position-embeddings --rotary-percent 1.0
    --no-position-embedding --normalization RMSNorm --swiglu --group-query-attention
    --num-query-groups 8 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 8192
    --make-vocab-size-divisible-by 1 --rotary-base 500000 --use-rope-scaling
"""
_LLAMA4 = f"""{_ALL}
    --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope
    --normalization RMSNorm --swiglu --num-layers 48 --hidden-size 5120 --ffn-hidden-size 16384
    --num-attention-heads 40 --group-query-attention --num-query-groups 8
    --moe-ffn-hidden-size 8192 --moe-router-score-function sigmoid --moe-router-topk 1
    --moe-router-topk-scaling-factor 1.0 --moe-router-dtype fp32
    --moe-shared-expert-intermediate-size 8192 --moe-aux-loss-coeff 1e-3
    --moe-token-dispatcher-type alltoall --moe-token-drop-policy probs
    --moe-router-load-balancing-type seq_aux_loss --rotary-percent 1.0 --rope-scaling-factor 8.0
    --rotary-base 500000 --rotary-interleaved --export-moe-apply-probs-on-input
    --padded-vocab-size 202048
"""
_DEEPSEEK = f"""{_ALL}
    --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope
    --normalization RMSNorm --swiglu --multi-latent-attention --kv-lora-rank 512 --v-head-dim 128
    --qk-head-dim 128 --qk-layernorm --qk-pos-emb-head-dim 64 --moe-router-pre-softmax
    --moe-token-dispatcher-type alltoall --moe-token-drop-policy probs
    --moe-router-load-balancing-type seq_aux_loss --rotary-percent 1.0 --sequence-parallel
"""
_DEEPSEEK_LARGE = f"""{_DEEPSEEK}
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --kv-channels 128 --q-lora-rank 1536
    --moe-ffn-hidden-size 2048 --moe-router-dtype fp32 --moe-router-score-function sigmoid
    --moe-router-bias-update-rate 1e-3 --moe-router-enable-expert-bias --moe-router-topk 8
    --moe-shared-expert-overlap --moe-shared-expert-intermediate-size 2048
    --moe-aux-loss-coeff 1e-4 --seq-length 4096 --mscale 1.0 --mscale-all-dim 1.0
    --recompute-activations --moe-layer-recompute
"""
_GPT_OSS = f"""{_ALL}
    --untie-embeddings-and-output-weights --normalization RMSNorm --hidden-size 2880
    --ffn-hidden-size 2880 --num-attention-heads 64 --group-query-attention --num-query-groups 8
    --kv-channels 64 --moe-ffn-hidden-size 2880 --moe-router-dtype fp32 --moe-router-topk 4
    --moe-aux-loss-coeff 0.0 --moe-token-dispatcher-type alltoall
    --moe-router-score-function softmax --moe-router-load-balancing-type aux_loss
    --seq-length 4096 --max-position-embeddings 40960 --make-vocab-size-divisible-by 128
    --rotary-percent 1.0 --rotary-base 150000 --no-bias-gelu-fusion --sequence-parallel
    --export-force-local-attention --no-bias-dropout-fusion --padded-vocab-size 201088
    --quick-geglu --glu-linear-offset 1.0 --softmax-type learnable --window-attn-skip-freq 2
    --enable-gpt-oss --activation-func-clamp-value 7.0 --window-size 127,0
"""
_NEMOTRON = """
    --save-interval 100000 --micro-batch-size 1 --bf16 --use-mcore-models --trust-remote-code
    --tokenizer-type HuggingFaceTokenizer --disable-bias-linear
    --untie-embeddings-and-output-weights --normalization RMSNorm --squared-relu
    --group-query-attention
"""
_NEMOTRON_H = f"""{_NEMOTRON}
    --num-query-groups 8 --mamba-num-groups 8
"""
_NEMOTRON_H_SMALL = f"""{_NEMOTRON_H}
    --no-masked-softmax-fusion --use-rotary-position-embeddings --no-rope-fusion
    --no-position-embedding --num-attention-heads 32 --mamba-head-dim 64 --mamba-state-dim 128
    --hybrid-layer-pattern M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-
    --seq-length 4096 --max-position-embeddings 8192 --make-vocab-size-divisible-by 1
    --rotary-percent 0.5
"""
_NEMOTRON_3 = f"""{_NEMOTRON}
    --is-hybrid-model --enable-experimental --moe-permute-fusion
    --use-fused-weighted-squared-relu --cross-entropy-loss-fusion
    --cross-entropy-fusion-impl native --moe-router-score-function sigmoid --moe-grouped-gemm
    --moe-aux-loss-coeff 1e-4 --moe-router-enable-expert-bias --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss --attention-backend flash
    --disable-gloo-process-groups --mamba-head-dim 64 --position-embedding-type none
    --num-query-groups 2 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
"""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Configuration: its source file, model flags, and ``layout``.

    ``layout`` are the flags that assign its layers to two stages if they do not divide evenly.
    """

    source: str
    flags: str
    layout: str = ""

    @property
    def words(self) -> list[str]:
        return self.flags.split()


RECIPES = {
    "qwen3-0.6b": Recipe(
        f"{MODELOPT}/Qwen/Qwen3-0.6B.sh",
        f"{_QWEN3} --num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072 "
        "--num-attention-heads 16 --num-query-groups 8",
    ),
    "qwen3-8b": Recipe(
        f"{MODELOPT}/Qwen/Qwen3-8B.sh",
        f"{_QWEN3} --untie-embeddings-and-output-weights --num-layers 36 --hidden-size 4096 "
        "--ffn-hidden-size 12288 --num-attention-heads 32 --num-query-groups 8",
    ),
    "qwen3-30b-a3b": Recipe(
        f"{MODELOPT}/Qwen/Qwen3-30B-A3B.sh",
        f"{_QWEN3_MOE} --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 "
        "--num-attention-heads 32 --moe-ffn-hidden-size 768",
    ),
    "qwen3-235b-a22b": Recipe(
        f"{MODELOPT}/Qwen/Qwen3-235B-A22B.sh",
        f"{_QWEN3_MOE} --num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 "
        "--num-attention-heads 64 --moe-ffn-hidden-size 1536 --moe-layer-recompute "
        "--rotary-seq-len-interpolation-factor 1 --attention-dropout 0.0 --hidden-dropout 0.0",
    ),
    "llama-3.1-8b": Recipe(
        f"{MODELOPT}/meta-llama/Llama-3.1-8B-Instruct.sh",
        f"{_LLAMA3} --untie-embeddings-and-output-weights --num-layers 32 --hidden-size 4096 "
        "--ffn-hidden-size 14336",
    ),
    "llama-3.2-1b": Recipe(
        f"{MODELOPT}/meta-llama/Llama-3.2-1B-Instruct.sh",
        f"{_LLAMA3} --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192",
    ),
    "llama-3-8b": Recipe(
        "examples/llama/train_llama3_8b_h100_fp8.sh, without its DTYPE fp8",
        "--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 "
        "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128 "
        "--seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope "
        "--rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 "
        "--swiglu --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p "
        "--untie-embeddings-and-output-weights --disable-bias-linear --normalization RMSNorm "
        "--sequence-parallel --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion "
        "--calculate-per-token-loss --micro-batch-size 1",
    ),
    "llama-4-scout": Recipe(
        f"{MODELOPT}/meta-llama/Llama-4-Scout-17B-16E-Instruct.sh",
        f"{_LLAMA4} --qk-layernorm --num-experts 16 --seq-length 4096 "
        "--max-position-embeddings 4096 --make-vocab-size-divisible-by 128 --use-rope-scaling "
        "--sequence-parallel --no-bias-swiglu-fusion --export-qk-l2-norm",
    ),
    "llama-4-maverick": Recipe(
        f"{MODELOPT}/meta-llama/Llama-4-Maverick-17B-128E-Instruct.sh",
        f"{_LLAMA4} --recompute-activations --num-experts 128 --moe-layer-freq ([0,1]*24) "
        "--moe-layer-recompute --seq-length 2048 --max-position-embeddings 2048 "
        "--make-vocab-size-divisible-by 1 --no-rope-freq 4",
    ),
    "deepseek-v2-lite": Recipe(
        f"{MODELOPT}/deepseek-ai/DeepSeek-V2-Lite.sh",
        f"{_DEEPSEEK} --attention-dropout 0.0 --hidden-dropout 0.0 --norm-epsilon 1e-6 "
        "--num-layers 27 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 "
        "--kv-channels 16 --num-experts 64 --moe-layer-freq ([0]+[1]*26) "
        "--moe-ffn-hidden-size 1408 --moe-grouped-gemm --moe-router-score-function softmax "
        "--moe-router-topk 6 --moe-router-topk-scaling-factor 1.0 "
        "--moe-shared-expert-intermediate-size 2816 --moe-aux-loss-coeff 1e-3 --seq-length 1024 "
        "--max-position-embeddings 1024 --make-vocab-size-divisible-by 3200 "
        "--attention-softmax-in-fp32 --rotary-base 10000 --rotary-scaling-factor 40 "
        "--mscale 0.707 --mscale-all-dim 0.707",
        "--decoder-first-pipeline-num-layers 14 --decoder-last-pipeline-num-layers 13",
    ),
    "deepseek-v3": Recipe(
        f"{MODELOPT}/deepseek-ai/DeepSeek-R1.sh",
        f"{_DEEPSEEK_LARGE} --num-attention-heads 128 --num-experts 256 "
        "--moe-layer-freq [0]*3+[1]*58 --moe-router-num-groups 8 --moe-router-group-topk 4 "
        "--moe-router-topk-scaling-factor 2.5 --max-position-embeddings 163840 "
        "--make-vocab-size-divisible-by 1280 --rotary-base 10000 --rotary-scaling-factor 40",
        "--decoder-first-pipeline-num-layers 31 --decoder-last-pipeline-num-layers 30",
    ),
    "kimi-k2": Recipe(
        f"{MODELOPT}/moonshotai/Kimi-K2-Instruct.sh",
        f"{_DEEPSEEK_LARGE} --num-attention-heads 64 --num-experts 384 "
        "--moe-layer-freq [0]*1+[1]*60 --moe-router-topk-scaling-factor 2.827 "
        "--max-position-embeddings 131072 --make-vocab-size-divisible-by 1 --rotary-base 50000 "
        "--rotary-scaling-factor 32 --padded-vocab-size 163840 --trust-remote-code",
        "--decoder-first-pipeline-num-layers 31 --decoder-last-pipeline-num-layers 30",
    ),
    "gpt-oss-20b": Recipe(
        f"{MODELOPT}/openai/gpt-oss-20b.sh",
        f"{_GPT_OSS} --num-layers 24 --num-experts 32",
    ),
    "gpt-oss-120b": Recipe(
        f"{MODELOPT}/openai/gpt-oss-120b.sh",
        f"{_GPT_OSS} --num-layers 36 --num-experts 128",
    ),
    "gpt-oss-small": Recipe(
        "examples/gptoss/02_train.sh, without its DTYPE fp8",
        "--no-masked-softmax-fusion --disable-bias-linear --untie-embeddings-and-output-weights "
        "--no-rope-fusion --normalization RMSNorm --num-layers 12 --hidden-size 512 "
        "--ffn-hidden-size 2048 --num-attention-heads 64 --group-query-attention "
        "--num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --use-mcore-models "
        "--rotary-percent 1.0 --rope-type rope --position-embedding-type rope --rotary-base 10000 "
        "--no-bias-gelu-fusion --export-force-local-attention --no-bias-dropout-fusion "
        "--quick-geglu --glu-linear-offset 1.0 --softmax-type learnable --window-attn-skip-freq 2 "
        "--activation-func-clamp-value 7.0 --window-size 127,0 --enable-gpt-oss --num-experts 4 "
        "--moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 "
        "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 2048 "
        "--moe-router-dtype fp32 --moe-z-loss-coeff 1e-3 --moe-permute-fusion "
        "--micro-batch-size 1 --bf16 --use-flash-attn --attention-softmax-in-fp32 "
        "--accumulate-allreduce-grads-in-fp32 --recompute-activations --sequence-parallel",
    ),
    "nemotron-mini-4b": Recipe(
        f"{MODELOPT}/nvidia/Nemotron-Mini-4B-Instruct.sh",
        f"{_ALL} --trust-remote-code --disable-bias-linear --untie-embeddings-and-output-weights "
        "--use-rotary-position-embeddings --rotary-percent 0.5 --no-position-embedding "
        "--normalization LayerNorm --apply-layernorm-1p --squared-relu --num-layers 32 "
        "--hidden-size 3072 --ffn-hidden-size 9216 --num-attention-heads 24 "
        "--group-query-attention --num-query-groups 8 --seq-length 4096 "
        "--max-position-embeddings 4096 --make-vocab-size-divisible-by 1 --rotary-base 10000",
    ),
    "nemotron-h-4b": Recipe(
        f"{MODELOPT}/nvidia/Nemotron-H-4B-Instruct.sh",
        f"{_NEMOTRON_H_SMALL} --hidden-size 3072 --ffn-hidden-size 12288 --kv-channels 128 "
        "--mamba-num-heads 112 --rotary-base 10000",
    ),
    "nemotron-h-8b": Recipe(
        f"{MODELOPT}/nvidia/Nemotron-H-8B-Base-8K.sh",
        f"{_NEMOTRON_H_SMALL} --hidden-size 4096 --ffn-hidden-size 21504 --mamba-num-heads 128 "
        "--rotary-base 500000",
    ),
    "nemotron-h-47b": Recipe(
        f"{MODELOPT}/nvidia/Nemotron-H-47B-Reasoning-128K.sh",
        f"{_NEMOTRON_H} --is-hybrid-model --attention-backend flash --position-embedding-type none "
        "--num-layers 98 --hidden-size 8192 --ffn-hidden-size 30720 --num-attention-heads 64 "
        "--kv-channels 128 --mamba-head-dim 64 --mamba-num-heads 256 --mamba-state-dim 256 "
        "--hybrid-override-pattern "
        + 8 * "M-"
        + "M*-"
        + 9 * "M-"
        + "M*-"
        + 4 * "M-"
        + "M*-"
        + 4 * "M-"
        + "M*-"
        + 7 * "M-"
        + "--MM---M-M*-M-M-M-M-M- --seq-length 8192 --max-position-embeddings 8192",
    ),
    "nemotron-h-56b": Recipe(
        f"{MODELOPT}/nvidia/Nemotron-H-56B-Base-8K.sh, on a tensor rank instead of 8",
        f"{_NEMOTRON} --is-hybrid-model --attention-backend flash --position-embedding-type none "
        "--num-query-groups 8 --init-method-std 0.0099 --num-layers 118 --hidden-size 8192 "
        "--ffn-hidden-size 32768 --num-attention-heads 64 --kv-channels 128 --mamba-state-dim 256 "
        f"--hybrid-override-pattern M-M-M-M*-{9 * 'M-M-M-M-M*-'}M-M-M-M-M- "
        "--tiktoken-pattern v2 --exit-duration-in-mins 230 --seq-length 8192 "
        "--max-position-embeddings 8192",
    ),
    "nemotron-nano-9b-v2": Recipe(
        f"{MODELOPT}/nvidia/NVIDIA-Nemotron-Nano-9B-v2.sh",
        f"{_NEMOTRON_H} --is-hybrid-model --no-masked-softmax-fusion --no-rope-fusion "
        "--position-embedding-type none --num-layers 56 --hidden-size 4480 "
        "--ffn-hidden-size 15680 --num-attention-heads 40 --kv-channels 128 --mamba-head-dim 80 "
        "--mamba-num-heads 128 --mamba-state-dim 128 --hybrid-override-pattern "
        "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M- --seq-length 4096 "
        "--max-position-embeddings 131072 --make-vocab-size-divisible-by 1 "
        "--padded-vocab-size 131072",
    ),
    "nemotron-3-nano": Recipe(
        f"{MODELOPT}/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.sh",
        f"{_NEMOTRON_3} --moe-token-dispatcher-type allgather --num-experts 128 "
        "--moe-router-topk 6 --moe-router-topk-scaling-factor 2.5 "
        "--moe-shared-expert-intermediate-size 3712 --mamba-num-heads 64 --hybrid-override-pattern "
        f"{5 * 'MEMEM*E'}MEMEMEM*EMEMEMEME --init-method-std 0.0173 --num-layers 52 "
        "--hidden-size 2688 --num-attention-heads 32 --ffn-hidden-size 1856",
    ),
    "nemotron-3-super": Recipe(
        f"{MODELOPT}/nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16.sh",
        f"{_NEMOTRON_3} --moe-token-dispatcher-type allgather --num-experts 512 "
        "--moe-router-topk 22 --moe-router-topk-scaling-factor 5.0 --moe-latent-size 1024 "
        "--moe-shared-expert-intermediate-size 5376 --mamba-num-heads 128 "
        "--hybrid-override-pattern MEMEMEM*EMEMEMEM*EMEMEMEM*E"
        f"{4 * 'MEMEMEMEM*E'}MEMEMEM*EMEMEMEME --init-method-std 0.014 --num-layers 88 "
        "--hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 2688 "
        "--attention-dropout 0.0 --hidden-dropout 0.0",
    ),
    "nemotron-3-ultra": Recipe(
        f"{MODELOPT}/nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16.sh",
        f"{_NEMOTRON_3} --moe-token-dispatcher-type alltoall --num-experts 512 "
        "--moe-router-topk 22 --moe-router-topk-scaling-factor 5.0 --moe-latent-size 2048 "
        "--moe-shared-expert-intermediate-size 10240 --mamba-num-heads 256 "
        "--hybrid-override-pattern MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*E"
        "MEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME --init-method-std 0.0099 "
        "--num-layers 108 --hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 5120",
    ),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Worst error of a recipe, or the line that rejected it.

    ``model`` describes the certified model; ``first`` is the line that requested a layout.
    """

    passed: bool
    said: str
    model: str = ""
    first: str = ""


def outcome_of(recipe: Recipe, pp: int, batches: int) -> Outcome:
    """Certify a recipe, first with its original flags, then with its layout."""
    if recipe.layout and pp == 2:
        without = _certified(recipe.words, pp, 1)
        if without.passed:
            return without
        done = _certified([*recipe.words, *recipe.layout.split()], pp, batches)
        named = all(word in without.said for word in recipe.layout.split() if word.startswith("-"))
        return Outcome(done.passed and named, done.said, done.model, without.said)
    return _certified(recipe.words, pp, batches)


def _certified(words: list[str], pp: int, batches: int) -> Outcome:
    from megatron_epp.certify.degrees import Degrees
    from megatron_epp.certify.processes import ChildLost
    from megatron_epp.certify.trial import Trial
    from megatron_epp.mcore.certify.command import certify_training

    lines: list[str] = []
    try:
        judged = certify_training(Trial(Degrees(pp, 1, 1), (tuple(words),), batches), lines.append)
    except (ValueError, ChildLost) as refusal:
        return Outcome(False, str(refusal).splitlines()[0])
    worst = max(max(batch.loss_error, batch.gradient_error) for batch in judged)
    passed = all(batch.passed for batch in judged)
    why = [line for batch in judged for line in (*batch.problems, *batch.routing)]
    model = lines[0].splitlines()[0].split(": ", 1)[1]
    return Outcome(passed, "; ".join([f"{worst:.1e}", *why[:1]]), model)


HEADERS = ("configuration", "certified", "worst error, or why not", "as scaled down")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages (default: 2)")
    parser.add_argument("--batches", type=int, default=2, help="of each (default: 2)")
    parser.add_argument("--list", action="store_true", help="print names and sources")
    parser.add_argument("-o", "--output", metavar="FILE", help="append the table as markdown")
    args = parser.parse_args()
    for name in args.names:
        if name not in RECIPES:
            parser.error(f"no recipe {name!r}; known: {', '.join(RECIPES)}")
    if args.list:
        for name, recipe in RECIPES.items():
            print(f"{name:18} {recipe.source}")
        return 0
    from headline import heading, host, write

    from megatron_epp.show.table import markdown, text_table

    table, failed = [], 0
    for name in args.names or RECIPES:
        began = time.monotonic()
        found = outcome_of(RECIPES[name], args.pp, args.batches)
        failed += not found.passed
        table.append([name, "yes" if found.passed else "no", found.said, found.model])
        print(f"{name}: {'certified' if found.passed else 'NOT certified'}, {found.said} "
              f"({time.monotonic() - began:.0f} s)", flush=True)  # fmt: skip
        if found.first:
            print(f"    without {RECIPES[name].layout}: {found.first}", flush=True)
    print(text_table(HEADERS, table))
    write(args.output, heading(f"{host()}, --pp {args.pp}") + markdown(HEADERS, table) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
