#!/usr/bin/env bash
# Checks without running code: lint, format, docstrings, spelling, types, imports. Every check runs before the script fails.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
bin=${EPP_VENV:-.venv}/bin
failed=()

step() {
    local name=$1
    shift
    "$@" || failed+=("$name")
}

# Scripts carry few types; that they call the package as it is, mypy can tell all the same.
calls() {
    ! MYPYPATH=scripts/bench "$bin/mypy" --explicit-package-bases $(git ls-files 'scripts/*.py' 'examples/*.py' 'docs/*.py' |
        grep -v '^scripts/upstream/') | grep -E '\[(call-arg|name-defined)\]$'
}

step lint "$bin/ruff" check .
step format "$bin/ruff" format --check .
step spelling "$bin/codespell" --quiet-level 3 $(git ls-files '*.py' '*.md' '*.sh' '*.toml' '*.txt' 2>/dev/null || echo megatron_epp)
step types "$bin/mypy" megatron_epp
step calls calls
step imports "$bin/lint-imports" --no-logo --no-cache
if ((${#failed[@]})); then
    printf 'check: failed: %s\n' "${failed[*]}" >&2
    exit 1
fi
