#!/usr/bin/env bash
# Attacks the package as a careless user, a failing machine and an adversary would, and says what gave way.
#
#     bash scripts/attack.sh                      # everything, 16 minutes on two quiet cores
#     bash scripts/attack.sh --part lines         # one part; --list shows all attacks
#
# Exit status 1: something gave way. Everything happens in temporary folders, bounded in memory and time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD/scripts:$PWD
exec "${EPP_VENV:-.venv}/bin/python" -m attack "$@"
