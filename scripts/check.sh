#!/usr/bin/env bash
# What needs no run to be judged: lint, format, types (of mcore: what no model is built in), floors. All four speak before it fails.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
bin=${EPP_VENV:-.venv}/bin
failed=()

step() {
    local name=$1
    shift
    "$@" || failed+=("$name")
}

typed=()
for floor in ir corpus cost sim planner show cli __main__.py runtime layers control mcore/certify; do
    [[ -e megatron_epp/$floor ]] && typed+=("megatron_epp/$floor")
done
typed+=(megatron_epp/mcore/*.py)
step lint "$bin/ruff" check .
step format "$bin/ruff" format --check .
step types "$bin/mypy" "${typed[@]}"
step floors "$bin/python" -m pytest -q tests/test_floors.py tests/test_imports.py
if ((${#failed[@]})); then
    printf 'check: failed: %s\n' "${failed[*]}" >&2
    exit 1
fi
