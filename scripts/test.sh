#!/usr/bin/env bash
# Installs what is missing, checks, tests. Extra arguments go to pytest:  bash scripts/test.sh -k documents
#
# Tests run in as many processes as there are cores, 2 to 4 (EPP_TEST_WORKERS sets another number, 0 none).
# What needs a GPU runs, where there is none, over a reference of Transformer Engine's kernels (megatron_epp/te_reference), in a second
# run of pytest beside the first, by half as many processes: where a test waits, the other run computes. The last lines say what is
# skipped. Tests marked slow run with --slow.
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
pytest=("${EPP_VENV:-.venv}/bin/python" -m pytest --dist loadfile --no-loadscope-reorder --durations 40 --durations-min 5)

if nvidia-smi >/dev/null 2>&1; then
    exec "${pytest[@]}" -n "$workers" "$@"
fi
over_reference=("$@")
(($#)) || over_reference=(tests/gpu tests/te_reference)
said=$(mktemp)
EPP_TE_ON_CPU=h100 "${pytest[@]}" -n "$(((workers + 1) / 2))" -m gpu "${over_reference[@]}" >"$said" 2>&1 &
reference=$!
trap 'kill "$reference" 2>/dev/null || true; rm -f "$said"' EXIT
trap 'exit 130' INT TERM
failed=0 second=0
"${pytest[@]}" -n "$workers" -m "not gpu" "$@" || failed=$?
wait "$reference" || second=$?
trap 'rm -f "$said"' EXIT
cat "$said"
# 5 is pytest's own for: no test. Of both runs, the first that failed otherwise.
if ((failed == 0 || failed == 5)); then
    if ((second != 5)); then failed=$second; fi
fi
exit "$failed"
