#!/usr/bin/env bash
# Everything that only GPUs can tell, in the order in which one thing rests on another; one page of results.
#
#   bash scripts/gpu/gpu_day.sh [--minutes M] [--bound SECONDS] [--results FOLDER] [--state FILE] [--gpus N] [--list]
#       [--first] [--dry-run] [--page FILE] [STEP...]
#
# First what only a GPU can tell, by worth; then whether the numbers are right on one GPU, what everything turns on (SMs that messages hold, host
# time, whole iterations against predictions), certificates, several GPUs, what a host does, and levers. On a machine lent for minutes make the
# step corpus beforehand, on any host, and bring the folder of results.
# --first: only the steps by worth, whose bounds are at most ten minutes in all; --minutes is 9, and a second command with the
#   same --state does what is left. It wants the corpus, made beforehand.
# No step takes more than eight minutes. One for which there is no time left is "not reached", unless it would be the first.
# --state: a .tar.gz of logs, states and the page, taken up at the start and written anew after every step, for a host that
#   forgets: bring it back, and the day goes on. The corpus is made again.
# Each step has a bound of its own and a log in FOLDER (outputs/gpu-day); FOLDER/README.md is the page, written anew after
# every step, and written to --page besides. A step that fails or runs out of time hides nothing that comes after it. A second run skips what was ok, so the
# minutes (60; with --first 9) may come in pieces: what did not fit is "not reached". For 1, 2 or 8 GPUs: what needs more than there are is
# "skipped" by name. --bound: the most for any step. STEP: only these, ok or not.
#   python=... the interpreter (.venv/bin/python, else python3), with PYTHONPATH as it is: the project's environment need not exist.
# --dry-run: every step in a small size without a GPU, with emulated kernels of Transformer Engine and ranks of this host
#   (tests/engine): what fails then is ours. No figure of it is a measurement, and no bound is below four minutes.
#   With --first, scripts/bench/results/gpu-day-dry-run.md is such a page. How to run the day: docs/contributing/gpu_day.md.
# Exit status: 0 all ok or skipped, 1 something failed, ran out of time or was not reached, 2 a wrong flag.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2

fail() { printf 'gpu_day: %s\n' "$1" >&2; exit 2; }

minutes= bound=480 results= state= gpus= page= list=false dry=false first=false only=()
while (($#)); do
    case $1 in
        --minutes | --bound | --results | --state | --gpus | --page) (($# > 1)) || fail "$1 needs a value"; declare "${1#--}=$2"; shift ;;
        --list) list=true ;;
        --dry-run) dry=true ;;
        --first) first=true ;;
        -*) fail "unknown flag $1; usage: bash scripts/gpu/gpu_day.sh [--minutes M] [--bound SECONDS] [--results FOLDER] [--state FILE] [--gpus N] [--list] [--first] [--dry-run] [--page FILE] [STEP...]" ;;
        *) only+=("$1") ;;
    esac
    shift
done
minutes=${minutes:-$($first && echo 9 || echo 60)}
[[ $minutes =~ ^[0-9]+$ ]] || fail "--minutes $minutes: expected a whole number"
[[ $bound =~ ^[0-9]+$ ]] || fail "--bound $bound: expected a whole number"
most=$bound archive=$state
results=${results:-outputs/gpu-day$($dry && echo -dry-run)}
if $dry; then
    export EPP_ENGINE=${EPP_ENGINE:-tests.engine} CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1
    gpus=${gpus:-4}
fi
if [[ -z ${python:-} ]]; then
    python=python3
    [[ -x .venv/bin/python ]] && python=.venv/bin/python
fi
[[ -n $gpus ]] || gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
[[ $gpus =~ ^[0-9]+$ ]] || fail "--gpus $gpus: expected a whole number"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
export python results

deadline=$((SECONDS + 60 * minutes))
names=() of_step=() by_worth=()
declare -A small # what makes a step small: the last words of its command, in a dry run
failed=0 began_one=false

# add NAME GPUS SECONDS "what it settles" "lines of its log for the page (a pattern)" command...
add() {
    local words=()
    if $dry; then eval "words=(${small[$1]:-})"; fi
    names+=("$1")
    of_step+=("$(printf '%q ' "$@" ${words[@]+"${words[@]}"})")
}

ahead() { by_worth+=("$1"); add "$@"; } # a step of --first

lines_of() { # of a step's log, by name and pattern, for the page
    # 4 blanks: text as it is, whatever it holds
    # The command stands first; a list of arguments, with dots, says nothing.
    { tail -n +2 "$results/$1.log" | grep -avE ' \.{3,} ' | grep -aE "$2" || tail -n 5 "$results/$1.log"; } |
        tail -n 40 | sed 's|/[^ ]*/site-packages/||g' | cut -c1-320 | sed 's/^/    /'
}

summary() { # the page
    {
        printf '# A day with GPUs%s\n\n' "$($dry && echo ': dry run without a GPU')"
        printf '`bash scripts/gpu/gpu_day.sh%s%s`, %s, commit %s.\n\n' "$($first && echo ' --first')" "$($dry && echo ' --dry-run')" "$(date -u +%Y-%m-%d)" \
            "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
        if $dry; then
            printf 'This was a dry run on a CPU-only host: small sizes, emulated kernels and an emulated device (`tests/engine`).\n'
            printf 'The page says only that every step ends well. Its times, speeds and bytes are not measurements.\n'
        else
            printf '    %s\n' "$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null | sort | uniq -c || true)"
        fi
        printf '\n| step | settles | result | seconds |\n|---|---|---|---|\n'
        local entry name state
        for entry in "${of_step[@]}"; do
            eval "set -- $entry"
            state=$(cat "$results/$1.state" 2>/dev/null || echo "not reached| ")
            if $dry && [[ $entry == *--collect-only* && $state == ok* ]]; then state="tests found, not run|${state#*|}"; fi
            printf '| %s | %s | %s | %s |\n' "$($dry && echo "$1" || echo "[$1]($1.log)")" "$4" "${state%%|*}" "${state#*|}"
        done
        for entry in "${of_step[@]}"; do
            eval "set -- $entry"
            [[ -s $results/$1.log ]] || continue
            printf '\n## %s\n\n' "$1"
            # Made once of every log: after each step the page is written anew, for all steps.
            [[ $results/$1.lines -nt $results/$1.log ]] || lines_of "$1" "$5" >"$results/$1.lines"
            printf '%s\n' "$(<"$results/$1.lines")"
        done
    } >"$results/README.md"
    [[ -z $page ]] || cp "$results/README.md" "$page"
}

run() { # one step, as add() keeps it
    local name=$1 needs=$2 bound=$3 left=$((deadline - SECONDS)) began=$SECONDS status state
    shift 5
    if ((${#only[@]})); then
        [[ " ${only[*]} " == *" $name "* ]] || return
    elif [[ $(cat "$results/$name.state" 2>/dev/null) == ok\|* ]]; then
        printf '%-16s ok before\n' "$name"
        return
    fi
    if ((gpus < needs)); then
        printf 'skipped: needs %s GPUs, there are %s| \n' "$needs" "$gpus" >"$results/$name.state"
        printf '%-16s skipped: needs %s GPUs\n' "$name" "$needs"
        return
    fi
    if $dry && ((bound < 240)); then bound=240; fi # a host without a GPU is slower
    ((bound < most)) || bound=$most
    if ((left < 5)) || { $began_one && ((left < bound)); }; then
        printf 'not reached: the minutes were over| \n' >"$results/$name.state"
        failed=1
        return
    fi
    began_one=true
    ((bound < left)) || bound=$left
    printf '%s\n' "$*" >"$results/$name.log"
    # The whole group of processes ends with the bound: torchrun's children, too.
    timeout --kill-after=10 "$bound" "$@" >>"$results/$name.log" 2>&1 </dev/null
    status=$?
    case $status in
        0) state=ok ;;
        124 | 137) state="OUT OF TIME after $bound s" ;;
        *) state="FAILED with status $status" ;;
    esac
    ((status == 0)) || failed=1
    printf '%s|%s\n' "$state" "$((SECONDS - began))" >"$results/$name.state"
    printf '%-16s %s\n' "$name" "$state"
    summary
    [[ -z $archive ]] || pack
}

pack() { # whole, or not at all
    local new=$archive.new
    (cd "$results" && find . -maxdepth 1 -type f \( -name '*.log' -o -name '*.state' -o -name '*.md' \) -print0 | sort -z |
        tar --null --files-from=- -czf - ) >"$new" && mv "$new" "$archive"
}

# ------------------------------------------------------------------ the steps

test=("$python" -m pytest -q -p no:cacheprovider -p no:xdist)
tests='passed|failed|collected|^FAILED|^ERROR|^E  |skipped'
torchrun=("$python" -m torch.distributed.run --standalone --nproc-per-node)
model=(
    --num-layers 12 --hidden-size 768 --ffn-hidden-size 2048 --num-attention-heads 12 --normalization RMSNorm --swiglu
    --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0
    --hidden-dropout 0 --seq-length 4096 --max-position-embeddings 4096 --global-batch-size 16 --lr 6e-4 --bf16
    --data-path "$results/stdlib" --split 98,2,0 --eval-iters 0 --tokenizer-type SentencePieceTokenizer
    --tokenizer-model "$results/stdlib.model" --log-interval 1 --log-throughput
)
train=(-m megatron_epp.pretrain_gpt "${model[@]}" --micro-batch-size 1)
lines='lm loss|epp iteration|[Ee]rror|measured this device'
certify=("$python" -m megatron_epp certify --device cuda)
certified='certified|PP |^ +[0-9]+ |rror'
llama=(
    --num-layers 2 --hidden-size 1024 --num-attention-heads 16 --group-query-attention --num-query-groups 8 --swiglu
    --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
)
example=(env "DATA=$results/stdlib" "TOKENIZER=$results/stdlib.model" SIZE=1b ITERS=10 "GPUS=$($dry && echo 2 || echo "$gpus")" "PYTHON=$python")
lengths=${TMPDIR:-/tmp}/gpu-day-$$.lengths
printf '%s\n' 32768 24000 9000 6000 5000 4000 3000 2500 2000 2000 1500 1500 1000 1000 800 800 >"$lengths"
trap 'rm -f "$lengths"' EXIT

# Small sizes of a dry run: later flags take the place of earlier ones.
tiny="--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256
    --global-batch-size 4 --train-iters 2 --eval-iters 0"
here=--no-epp-plan-ahead # a planner's process takes seconds to start: that of the step example does
stage="--device cpu --bf16 --model tiny --repeats 1"
tiny_replay="$stage --layers 4 --pp 2 --context 256 --documents 6 --budget-gib 0.01 --lengths wikipedia --planners packing epp"
tiny_trains="--hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256
    --global-batch-size 4 --distributed-backend gloo"
small=(
    [corpus]="--exclude '*/*' --exclude '[!a-c]*' --sample-mb 0.1 --vocab-size 400 --workers 1 --quiet"
    [masks]="--tokens 64 --slice 32 --context 64 --heads 4 --groups 2 --size 32 --checked 64"
    [replay-whole]="$tiny_replay"
    [replay-split]="$tiny_replay"
    [trains-4-1]="$tiny_trains"
    [trains-2-2]="$tiny_trains"
    [op-host]="--device cpu --bf16 --model tiny --layers 1 2 --rows 32 --repeats 2"
    [experts]="--device cpu --hidden 64 --width 32 --experts 4 8 --rows 96"
    [certify-first]="--device cpu"
    [kernels]="-k 'alone-bfloat16'"
    # scripts/test_all.sh runs all of these tests, too: of two files one runs here; of the others it is seen that they are found.
    [first-iteration]="--collect-only"
    [certify-kernels]="--device cpu --batches 2"
    [training]="--collect-only"
    [shared-nccl-2-1]="--collect-only"
    [certificates]="--collect-only"
    [loops]="--collect-only"
    [prefixes]="--collect-only"
    [log-probs]="-k bfloat16"
    [flex]="--collect-only"
    [host-cost]="--device cpu --bf16 --model tiny --layers 2 --tokens 64"
    [multi-gpu]="--collect-only"
    [certify]="--device cpu --batches 2 $tiny"
    [held-sms]="--tokens 64 --hidden 64 --ffn 128 --heads 4"
    [stock]="$tiny"
    [replay]="$tiny_replay"
    [example]="$tiny --num-query-groups 2 --epp-cost-model analytic"
    [stage-llama3-8b]="$stage --slices 64 --contexts 0 128 --lengths 128"
    [stage-llama-7b]="$stage --slices 64 --contexts 0 128 --lengths 128"
    [recompilations]="$tiny --epp-cost-model analytic $here"
    [overlaps]="$tiny $here"
    [fp8]="--collect-only"
    [split]="-k i_leaves"
    [offload]="--collect-only"
    [lazy-loading]="$tiny --epp-cost-model analytic $here"
    [certify-tp]="--device cpu --batches 2 $tiny"
    [example-tp]="$tiny --num-query-groups 2 --epp-cost-model analytic $here"
)

# What every later step stands on.
add host 1 120 "driver, CUDA, allocator, what a process sets before CUDA starts" '^(wrong|gpus|torch|context|segments|Transformer|[A-Z_]+=)' \
    "$python" scripts/gpu/host.py
add corpus 0 180 "real text to train on: the standard library's source" 'documents|tokens|rror' \
    "$python" scripts/prepare_corpus.py --standard-library --shuffle 1 --append-eod -o "$results/stdlib"
# By worth: what only a GPU can tell (--first). Bounds add up to ten minutes at most.
ahead masks 1 40 "attention by mask: which backward computes masked tiles; a slice in two calls; torch's kernels" '^[0-9]|^a slice|^torch|^[a-z]+ .* [0-9]|WRONG|rror' \
    "$python" scripts/gpu/attention_masks.py
replay=(
    "$python" scripts/bench/gpu_replay.py --model llama-7b --layers 8 --pp 4 --lengths "$lengths" --documents 16 --context 32768
    --budget-gib 10
)
for backward in whole split; do
    ahead replay-$backward 1 75 "whole iterations with ${backward} backwards: predicted against replayed" '^\||epp|packing|rror' \
        "${replay[@]}" --repeats 2 --planners packing-best epp --levers "default$([[ $backward == split ]] || echo ,-wsplit)" \
        --keep "$results/replayed-$backward" -o "$results/replay-$backward.md"
done
trains() { # PP TP [FLAG]
    ahead "trains-$1-$2" 1 100 "four ranks on one GPU over NCCL, PP $1, TP $2, V, split backwards: two iterations end" "$lines|does not move" \
        "${torchrun[@]}" 4 tests/gpu/shared_gpu.py "${model[@]}" --micro-batch-size 1 --num-layers 8 --seq-length 2048 --global-batch-size 8 \
        --max-position-embeddings 2048 --pipeline-model-parallel-size "$1" --tensor-model-parallel-size "$2" "${@:3}" --train-iters 2 --epp \
        --epp-placement v --epp-vocab-parallel on --epp-cost-model analytic --epp-memory-budget-gib 1 --no-epp-plan-ahead \
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
}
trains 4 1
trains 2 2 --sequence-parallel
ahead op-host 1 60 "host time of an op, a layer and a piece, for F, B, I, W; functions that take it" '^[FBIW] |^op |^ *[0-9.]+ +[0-9]+  |rror' \
    "$python" scripts/gpu/op_host.py
ahead experts 1 80 "all experts of a rank as one product: time and errors beside a product for each" '(apart|stacked) |^ *experts|rror' \
    "$python" scripts/gpu/experts.py
ahead certify-first 1 60 "certificates side by side over NCCL: TP 2 in float64 and in bf16, grouped experts over EP 2" "$certified" \
    env EPP_SHARE_GPUS=1 "ENGINE=--transformer-impl transformer_engine" "LLAMA=${llama[*]}" bash -c '
        "$@" --pp 1 --tp 2 & exact=$!
        "$@" --pp 1 --tp 2 --dtype bf16 $ENGINE $LLAMA --sequence-parallel & half=$!
        "$@" --pp 1 --dp 2 --dtype bf16 $ENGINE $LLAMA --expert-model-parallel-size 2 --num-experts 16 --moe-router-topk 4 \
            --moe-ffn-hidden-size 384 --moe-token-dispatcher-type alltoall --moe-grouped-gemm --expert-tensor-parallel-size 1 & experts=$!
        wait $exact && wait $half && wait $experts' certify "${certify[@]}" --batches 2
# Are the numbers right?
add kernels 1 240 "attention's kernels, te and torch: against plain attention" "$tests" "${test[@]}" tests/gpu/test_kernels.py
add first-iteration 1 180 "no gradient is lost in an iteration's first backward; the host waits for no value" "$tests" \
    "${test[@]}" tests/gpu/test_first_iteration.py tests/gpu/test_host_waits.py
add certify-kernels 1 300 "random plans by this device's kernels, in bf16: at most twice the reference model's own errors" "$certified" \
    "${certify[@]}" --pp 1 --dtype bf16 --transformer-impl transformer_engine "${llama[@]}" --batches 12
shared() { # several ranks on one GPU
    add "shared-$1" 1 240 "pipelines of several ranks on one GPU (back end, stages, TP: $1): losses of one rank" "$tests" \
        "${test[@]}" tests/gpu/test_shared_gpu.py -k "$1"
}
shared nccl-2-1
add training 1 400 "a training's losses against Megatron's own" "$tests" "${test[@]}" tests/gpu/test_training.py
# What everything turns on: products beside messages that wait, the host's time; then whether predictions are right.
add held-sms 1 300 "products and attention beside a message that waits, by its blocks and the SMs left free" '^margin|^products by|rror' \
    "$python" scripts/gpu/held_sms.py
add host-cost 1 90 "host time of a layer: below how many tokens the host is the bottleneck" '^(none|full|F,|B,)|rror' \
    "$python" scripts/gpu/host_cost.py
add overlaps 1 200 "measured calibration under the example scripts' overlaps, several buckets" "$lines" \
    "${torchrun[@]}" 1 "${train[@]}" --train-iters 4 --epp --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --ddp-bucket-size 4000000
add replay 1 400 "whole iterations stage by stage: planners against each other, predicted against replayed" '^\||epp|packing|rror' \
    "${replay[@]}" --repeats 1 --keep "$results/replayed" -o "$results/replay.md"
add stage-llama-7b 1 300 "the same, a key head for every query head" '^ *[0-9]+ |median|\||rror' \
    "$python" scripts/bench/gpu_stage.py --model llama-7b --repeats 2 --slices 2048 9001 --contexts 0 32768 131072 --lengths 32768 131072 \
    -o "$results/stage-llama-7b.md"
# More of whether the numbers are right.
certificates=("${test[@]}" tests/gpu/test_certificates.py -k)
add certificates 1 480 "random plans over NCCL, ranks sharing the GPU: every layer kind and degree of parallelism" "$tests" \
    "${certificates[@]}" "not loops and not prefixes"
add loops 1 300 "external training loops, slices: gradients in bf16" "$tests" "${certificates[@]}" "loops and not prefixes"
add prefixes 1 240 "documents that continue others, computed once: gradients" "$tests" "${certificates[@]}" prefixes
add log-probs 1 60 "log-probabilities and entropies by blocks of logits: errors beside all logits at once" "$tests" \
    "${test[@]}" tests/gpu/test_log_probs.py
# The same over several GPUs.
add certify 2 400 "random plans over NCCL, in float64: gradients of the reference model to 1e-12" "$certified" \
    "${certify[@]}" --pp 2 --batches 10
add multi-gpu 2 480 "pipelines and tensor parallelism over NCCL: losses of one GPU, with the example's flags" "$tests" \
    "${test[@]}" -rs tests/gpu/test_multi_gpu.py
add flex 2 300 "exchanges of tokens by DeepEP and HybridEP (where deep_ep is): losses of alltoall" "$tests" "${test[@]}" -rs tests/gpu/test_flex.py
add certify-tp 4 480 "random plans with two-way tensor parallelism, reductions overlapped" "$certified" \
    "${certify[@]}" --pp 2 --tp 2 --overlap --batches 10
# Whole iterations, beside stock.
add stock 1 200 "the same model by Megatron's own schedule" "$lines" "${torchrun[@]}" 1 "${train[@]}" --train-iters 30 \
    --no-gradient-accumulation-fusion
add example 2 480 "examples/pretrain_gpt_epp.sh as it stands: time and memory, predicted and measured" "$lines" \
    "${example[@]}" bash examples/pretrain_gpt_epp.sh
add example-tp 4 480 "the same with two-way tensor parallelism" "$lines" "${example[@]}" TP=2 bash examples/pretrain_gpt_epp.sh
# Are the predictions right? Calibration's bytes and seconds against other chunks than it measured.
add stage-llama3-8b 1 300 "bytes and seconds predicted against measured, key heads in groups, vocabulary of 128K" '^ *[0-9]+ |median|\||rror' \
    "$python" scripts/bench/gpu_stage.py --model llama3-8b --repeats 2 --slices 2048 9001 --contexts 0 32768 98304 --lengths 32768 \
    -o "$results/stage-llama3-8b.md"
# What a host and its kernels do.
add host-lazy 1 60 "what loading kernels when they are first used saves: memory of the context" '^(wrong|context)' \
    env CUDA_MODULE_LOADING=LAZY "$python" scripts/gpu/host.py
add lazy-loading 2 300 "a pipeline with lazily loaded kernels: does it end?" "$lines" \
    env CUDA_MODULE_LOADING=LAZY "${torchrun[@]}" 2 "${train[@]}" --train-iters 10 --epp --pipeline-model-parallel-size 2
add recompilations 1 240 "fusions compiled anew for chunks of new sizes: how often, and whether a limit was hit" 'Recompiling function|recompile_limit|lm loss' \
    env TORCH_LOGS=recompiles "${torchrun[@]}" 1 "${train[@]}" --train-iters 30 --epp
# Number formats and levers.
add fp8 1 300 "fp8: weights quantised once an iteration, or held so, slices, what is saved" "$tests" "${test[@]}" tests/gpu/test_fp8.py
add split 1 200 "I and W of Transformer Engine's linears (lever wsplit)" "$tests" "${test[@]}" tests/gpu/test_split.py
add offload 1 200 "layers in pinned host memory (letter o): gradients, memory, speed of the copies" "$tests" "${test[@]}" tests/gpu/test_offload.py
# More of what is known by now.
shared nccl-4-1
shared nccl-2-2
shared gloo-2-1


if $first; then
    kept=()
    for entry in "${of_step[@]}"; do
        [[ " ${by_worth[*]} " != *" ${entry%% *} "* ]] || kept+=("$entry")
    done
    names=("${by_worth[@]}") of_step=("${kept[@]}")
fi
for name in ${only[@]+"${only[@]}"}; do
    [[ " ${names[*]} " == *" $name "* ]] || fail "no step $name; there are: ${names[*]}"
done
if $list; then
    for entry in "${of_step[@]}"; do
        eval "set -- $entry"
        printf '%-16s %s GPUs, %4s s   %s\n' "$1" "$2" "$3" "$4"
    done
    exit 0
fi
mkdir -p "$results" || fail "--results $results: cannot be made"
if [[ -n $archive ]]; then
    [[ $archive == /* ]] || archive=$PWD/$archive
    if [[ -e $archive ]]; then
        tar -xzf "$archive" -C "$results" || fail "--state $archive: no archive of a day before"
    fi
    [[ -e $results/stdlib.idx ]] || rm -f "$results/corpus.state"
fi
if $first && [[ ! -e $results/stdlib.idx ]]; then
    fail "--first: no corpus $results/stdlib; make it beforehand, on any host, and bring the folder: bash scripts/gpu/gpu_day.sh --results $results corpus"
fi
for entry in "${of_step[@]}"; do
    eval "run $entry"
done
summary
printf 'the page: %s/README.md\n' "$results"
exit "$failed"
