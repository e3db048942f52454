#!/usr/bin/env bash
# Installs what is missing, checks, tests. Extra arguments go to pytest:  bash scripts/test.sh -k documents
#
# Tests run in as many processes as there are cores, 2 to 4 (EPP_TEST_WORKERS sets another number, 0 none).
# What needs a GPU runs, where there is none, over a reference of Transformer Engine's kernels (megatron_epp/te_reference), in a second
# run of pytest; the last lines say what is skipped. Tests marked slow, half an hour of two cores more, run with --slow.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE  # every process would compile the package anew: a fifth of a second for a command

bash scripts/setup_env.sh
# The planners' loops are compiled once and kept: here, while the checks have the other core, and not by every test process
# for itself. What goes wrong, the tests tell.
"${EPP_VENV:-.venv}/bin/python" -m megatron_epp compare --lengths wlb --model gpt-7b --device a100-80g --pp 4 --cp 8 --context 65536 \
    --global-batch-size 16 --batches 1 --levers all >/dev/null 2>&1 &
compiling=$!
bash scripts/check.sh
wait "$compiling" || true
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc 2>/dev/null || echo 2)  # nproc believes OMP_NUM_THREADS
workers=${EPP_TEST_WORKERS:-$((cores < 2 ? 2 : cores > 4 ? 4 : cores))}
# A file stays in one process: its fixtures, some of which start a training run, are then built once.
# Files keep the order of tests/conftest.py, longest first, or one process ends long after the others.
failed=5  # pytest's own for: no test
run() {
    local status=0
    "${EPP_VENV:-.venv}/bin/python" -m pytest -n "$workers" --dist loadfile --no-loadscope-reorder \
        --durations 40 --durations-min 5 "$@" || status=$?
    if ((failed == 5 || (failed == 0 && status != 5))); then failed=$status; fi
}

if nvidia-smi >/dev/null 2>&1; then
    run "$@"
else
    run -m "not gpu" "$@"
    (($#)) || set -- tests/gpu tests/te_reference
    EPP_TE_ON_CPU=h100 run -m gpu "$@"
fi
exit "$failed"
