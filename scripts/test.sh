#!/usr/bin/env bash
# Installs what is missing, checks, tests. Extra arguments go to pytest:  bash scripts/test.sh -k documents
#
# Tests run in one process more than there are cores, at most 4 (EPP_TEST_WORKERS sets another number, 0 none): those
# that train wait for messages a third of the time.
# What needs a GPU is skipped where there is none; the last lines say how many.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1

bash scripts/setup_env.sh
bash scripts/check.sh
cores=$(nproc 2>/dev/null || echo 2)
workers=${EPP_TEST_WORKERS:-$((cores < 3 ? cores + 1 : 4))}
# A file stays in one process: its fixtures, some of which start a training run, are then built once.
# Files keep the order of tests/conftest.py, longest first, or one process ends long after the others.
exec "${EPP_VENV:-.venv}/bin/python" -m pytest -n "$workers" --dist loadfile --no-loadscope-reorder "$@"
