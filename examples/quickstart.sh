#!/usr/bin/env bash
# From a fresh checkout to a trained model: the environment, a corpus of real documents (the source
# text of Python's standard library), a small Llama-style model trained over two pipeline stages with
# elastic plans. Then the same batches run four ways: packed to the context, packed to the fastest
# length of each batch, elastic in the memory of packing, and elastic in two fifths of it. Megatron's
# own schedule runs at a short context, for comparison. Prints a plan, the losses and a table; draws what happened.
#
#   bash examples/quickstart.sh [FOLDER]        default: quickstart; 5 to 6 minutes on two cores
#
# It runs on the CPU alone, in two processes that communicate over gloo, also where there are GPUs: a
# demonstration of schedules, not of hardware. examples/pretrain_gpt_epp.sh trains on GPUs.
# SIZE       24k (default) or 4k: the settings below; 4k is what the quickstart trained at first
# ITERS, CONTEXT, BATCH, BUDGET, COMPARED     instead of one of them
set -euo pipefail
case ${1:-} in
-h | --help)
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
-*)
    echo "quickstart: unknown option $1; expected a folder to write to" >&2
    exit 2
    ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-quickstart}

# All sizes. The last of the two stages also has the LM head, so it has fewer layers.
# settings: CONTEXT, documents of a BATCH, ITERS trained, batches COMPARED, BUDGET in GiB of
# activations per stage (of training; what is compared has packing's own), learning rate's warm-up
case ${SIZE:-24k} in
24k)
    settings=(24576 6 8 3 1 2)
    shape=(--num-layers 3 --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 1
        --hidden-size 128 --ffn-hidden-size 344
        --num-attention-heads 2 --kv-channels 32 --num-query-groups 1)
    ;;
4k)
    settings=(4096 8 14 3 1 4)
    shape=(--num-layers 6 --decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 2
        --hidden-size 256 --ffn-hidden-size 688
        --num-attention-heads 4 --num-query-groups 2)
    ;;
*)
    echo "quickstart: SIZE=$SIZE: expected 24k or 4k" >&2
    exit 2
    ;;
esac
CONTEXT=${CONTEXT:-${settings[0]}}
BATCH=${BATCH:-${settings[1]}}
ITERS=${ITERS:-${settings[2]}}
COMPARED=${COMPARED:-${settings[3]}}
BUDGET=${BUDGET:-${settings[4]}}
warmup=${settings[5]}
short=2048 # a context whose square Megatron's attention on a CPU can hold
short_iterations=3

for name in CONTEXT BATCH ITERS COMPARED; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || {
        echo "quickstart: $name=${!name}: expected a whole number of at least 1" >&2
        exit 2
    }
done
((ITERS > warmup)) || {
    echo "quickstart: ITERS=$ITERS: expected more than the $warmup iterations of warm-up" >&2
    exit 2
}
[[ $BUDGET =~ ^[0-9]*\.?[0-9]+$ ]] || {
    echo "quickstart: BUDGET=$BUDGET: expected GiB, as in 0.5" >&2
    exit 2
}

say() { printf '\n=== %s\n' "$*"; }

say "environment"
bash scripts/setup_env.sh
python=${EPP_VENV:-.venv}/bin/python
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_DEVICE_MAX_CONNECTIONS=1 CUDA_VISIBLE_DEVICES=""

mkdir -p "$out"
# The planner's inner loops are compiled when first used: now, or the first iteration would wait for it.
"$python" -m megatron_epp plan --lengths wlb --model gpt-7b --device a100-80g --pp 2 --cp 8 --context 16384 \
    --global-batch-size 32 --memory-budget-gib 38 >"$out/compile.log" 2>&1 &
compiling=$!

say "corpus: the source text of this Python's standard library"
corpus=$out/corpus/stdlib
if [[ ! -f $corpus.idx ]]; then
    "$python" scripts/prepare_corpus.py --standard-library --shuffle 1 --append-eod -o "$corpus"
else
    echo "$corpus.idx is there"
fi

wait "$compiling" || { tail -n 5 "$out/compile.log" >&2; exit 1; }

flags() { # flags CONTEXT ITERATIONS
    echo "${shape[@]}" --group-query-attention --normalization RMSNorm --swiglu \
        --disable-bias-linear --position-embedding-type rope \
        --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 \
        --pipeline-model-parallel-size 2 --seq-length "$1" --max-position-embeddings "$1" \
        --global-batch-size "$BATCH" --train-iters "$2" --lr 3e-3 --lr-warmup-iters "$warmup" \
        --lr-decay-iters "$ITERS" --min-lr 3e-4 --lr-decay-style cosine --clip-grad 1.0 \
        --data-path "$corpus" --split 98,2,0 --eval-iters 0 \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$corpus.model" \
        --log-interval 1
}

run() { # run NAME PROGRAM... : progress on the terminal, everything in NAME.log
    local name=$1 job
    shift
    : >"$out/$name.log"
    "$python" -m torch.distributed.run --standalone --nproc-per-node 2 "$@" \
        >"$out/$name.log" 2>&1 </dev/null &
    job=$!
    trap 'kill "$job" 2>/dev/null || true' EXIT
    "$python" examples/quickstart_report.py follow "$out/$name.log" "$job"
    wait "$job" || {
        grep -h 'megatron_epp: error' "$out/$name.log" >&2 || tail -n 30 "$out/$name.log" >&2
        echo "quickstart: the run '$name' failed; its log is $out/$name.log" >&2
        exit 1
    }
    trap - EXIT
}

cost=$out/cost-model.json
say "1 of 4: elastic pipelines, context $CONTEXT, $ITERS iterations"
# The first run measures this host once; the others plan with the same figures.
rm -rf "$out/epp" "$out/turns" "$out/epp-short"
run epp -m megatron_epp.pretrain_gpt $(flags "$CONTEXT" "$ITERS") --epp --epp-record "$out/epp" \
    --epp-memory-budget-gib "$BUDGET"
cp "$out/epp/epp-cost-model.json" "$cost"

say "2 of 4: $COMPARED batches, each packed, packed at best, elastic, elastic in less memory"
# Iteration 1 warms up, then every batch comes four times (quickstart_turns.py). Budgets are its own.
run turns examples/quickstart_turns.py $(flags "$CONTEXT" $((4 * COMPARED + 1))) --epp \
    --epp-record "$out/turns" --epp-cost-model "$cost"

say "3 of 4: elastic pipelines at context $short"
run epp-short -m megatron_epp.pretrain_gpt $(flags "$short" "$short_iterations") --epp \
    --epp-record "$out/epp-short" --epp-cost-model "$cost" --epp-memory-budget-gib "$BUDGET"

say "4 of 4: Megatron's own schedule at context $short"
run stock scripts/bench/stock.py $(flags "$short" "$short_iterations") --micro-batch-size 1

say "results"
"$python" examples/quickstart_report.py report "$out" "$BUDGET"
