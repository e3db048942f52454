#!/usr/bin/env bash
# Trains a Llama-style model through elastic pipelines on one node, as Megatron-LM's examples do.
#
#   DATA=data/corpus TOKENIZER=data/corpus.model bash examples/pretrain_gpt_epp.sh [more Megatron flags]
#
# DATA is the prefix of a .bin/.idx corpus and TOKENIZER a sentencepiece model
# (scripts/prepare_corpus.py makes both). The other variables, with their defaults:
#   GPUS      processes of this node: the number of GPUs, or 2 without any (gloo, on the CPU)
#   PP TP     pipeline stages (GPUS) and tensor-parallel degree (1); replicas are what is left
#   CONTEXT   the most inputs of a document (16384; 2048 without GPUs)
#   BATCH     documents in a global batch (64; 8 without GPUs)
#   ITERS     iterations (100)
#   SIZE      tiny (runs on a laptop), 1b, 7b or 13b: the shape below
#   SAVE      checkpoint folder; empty: none
#   PYTHON    .venv/bin/python
set -euo pipefail

: "${DATA:?the prefix of a .bin/.idx corpus; scripts/prepare_corpus.py makes one}"
: "${TOKENIZER:?a sentencepiece model; scripts/prepare_corpus.py makes one}"
PYTHON=${PYTHON:-.venv/bin/python}
found=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)
GPUS=${GPUS:-$((found > 0 ? found : 2))}
TP=${TP:-1}
PP=${PP:-$((GPUS / TP))}
CONTEXT=${CONTEXT:-$((found > 0 ? 16384 : 2048))}
BATCH=${BATCH:-$((found > 0 ? 64 : 8))}
ITERS=${ITERS:-100}
SAVE=${SAVE:-}

# Many hardware queues: with the one that Megatron users set, a posted receive would stand in front of
# the work that its sender waits for (mcore/patching/cuda_host.py, which shows Megatron what it wants).
export CUDA_DEVICE_MAX_CONNECTIONS=32
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# Errors end the job instead of hanging it.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
# What every rank's communicators were doing is written down when one of them waits for too long.
export TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

case ${SIZE:-$( ((found > 0)) && echo 7b || echo tiny)} in
    tiny) shape=(--num-layers 4 --hidden-size 256 --ffn-hidden-size 688 --num-attention-heads 4 --num-query-groups 2) ;;
    1b) shape=(--num-layers 16 --hidden-size 2048 --ffn-hidden-size 5504 --num-attention-heads 16 --num-query-groups 8) ;;
    7b) shape=(--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --num-query-groups 8) ;;
    13b) shape=(--num-layers 40 --hidden-size 5120 --ffn-hidden-size 13824 --num-attention-heads 40 --num-query-groups 8) ;;
    *) echo "SIZE=${SIZE}: expected tiny, 1b, 7b or 13b" >&2; exit 2 ;;
esac

model=(
    "${shape[@]}"
    --group-query-attention
    --seq-length "$CONTEXT"
    --max-position-embeddings "$CONTEXT"
    --position-embedding-type rope
    --rotary-base 500000
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
)
training=(
    --global-batch-size "$BATCH"
    --train-iters "$ITERS"
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction 0.02
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --bf16
    --accumulate-allreduce-grads-in-fp32 # raw token sums are reduced
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --dist-ckpt-optim-fully-reshardable # checkpoints resume with other degrees, too
)
parallel=(--pipeline-model-parallel-size "$PP" --tensor-model-parallel-size "$TP")
((TP > 1)) && parallel+=(--sequence-parallel)
data=(
    --data-path "$DATA"
    --split 98,2,0
    --tokenizer-type SentencePieceTokenizer
    --tokenizer-model "$TOKENIZER"
    --eval-interval 50 --eval-iters 2
)
logging=(--log-interval 1 --log-throughput)
[[ -n $SAVE ]] && logging+=(--save "$SAVE" --load "$SAVE" --save-interval 50)

exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$GPUS" \
    -m megatron_epp.pretrain_gpt \
    "${model[@]}" "${training[@]}" "${parallel[@]}" "${data[@]}" "${logging[@]}" \
    --epp "$@"
