#!/usr/bin/env bash
# The body of test.sh and test_all.sh:  bash scripts/tiers.sh first|rest [pytest's arguments]
#
#   first   the checks, then the tests without the marks `everything` and `gpu`
#   rest    the tests with one of these marks, and nothing of `first`
#
# EPP_TEST_WORKERS=n sets the number of processes (default: the number of cores, 2 to 4; 0: none). Half as many more run,
# because many tests wait for other processes. Without a GPU, tests marked `gpu` run with emulated kernels of Transformer
# Engine, in a second pytest process. The last lines report what was skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tier=$1
shift
export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE  # every process would compile the package again: a fifth of a second for a command

bash scripts/setup_env.sh
python=${EPP_VENV:-.venv}/bin/python
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc 2>/dev/null || echo 2)  # nproc obeys OMP_NUM_THREADS
workers=${EPP_TEST_WORKERS:-$((cores < 2 ? 2 : cores > 4 ? 4 : cores))}
half=$(((workers + 1) / 2))
# The tests of a file run in one process, so that a fixture, which may be a training run, is built once. Files keep the order of
# tests/conftest.py, longest first: otherwise one process ends long after the others.
pytest=("$python" -m pytest --dist loadfile --no-loadscope-reorder --durations 40 --durations-min 5)

if [[ $tier == first ]]; then
    # Compile and cache the planners' loops once, on one core, while the checks use the other. Tests report errors.
    "$python" -m megatron_epp compare --lengths wlb --model llama3-8b --device h100-80g --pp 4 --cp 8 --context 65536 \
        --global-batch-size 16 --batches 1 --levers all >/dev/null 2>&1 &
    compiling=$!
    bash scripts/check.sh
    wait "$compiling" || true
    exec "${pytest[@]}" -n "$((workers + half))" -m "not gpu and not everything" "$@"
fi

if nvidia-smi >/dev/null 2>&1; then
    exec "${pytest[@]}" -n "$workers" -m "gpu or everything" "$@"
fi
emulated=("$@")
(($#)) || emulated=(tests/gpu tests/engine)
output=$(mktemp)
EPP_ENGINE=tests.engine "${pytest[@]}" -n "$half" -m gpu "${emulated[@]}" >"$output" 2>&1 &
emulation=$!
trap 'kill "$emulation" 2>/dev/null || true; rm -f "$output"' EXIT
trap 'exit 130' INT TERM
failed=0 second=0
"${pytest[@]}" -n "$workers" -m "everything and not gpu" "$@" || failed=$?
wait "$emulation" || second=$?
trap 'rm -f "$output"' EXIT
cat "$output"
# pytest exits with 5 if it finds no test. Otherwise the first failure counts.
if ((failed == 0 || failed == 5)); then
    if ((second != 5)); then failed=$second; fi
fi
exit "$failed"
