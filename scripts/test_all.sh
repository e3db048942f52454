#!/usr/bin/env bash
# Runs everything: scripts/test.sh, the second tier of tests (tests/TIERS.md), the planners with other packages, and external
# training loops with the oldest and the newest Megatron.
#
#   bash scripts/test_all.sh             # everything
#   bash scripts/test_all.sh --rest      # what scripts/test.sh leaves out
#   bash scripts/test_all.sh -k window   # both tiers of tests; arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# pytest exits with 5 if it finds no test.
first=0 second=0
if [[ ${1:-} == --rest ]]; then
    shift
    first=5
else
    bash scripts/test.sh "$@" || first=$?
fi
bash scripts/tiers.sh rest "$@" || second=$?
status=$first
if ((first == 5 || (first == 0 && second != 5))); then status=$second; fi
if ((status != 0 || $# > 0)); then exit "$status"; fi
bash scripts/ranges.sh
exec "${EPP_VENV:-.venv}/bin/python" scripts/upstream/megatron_matrix.py --megatron 0.16.1 0.19.2
