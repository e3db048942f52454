#!/usr/bin/env bash
# What needs no run to be judged: lint, format, docstrings, spelling, types, imports, links of the site. All of them speak before it fails.
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
# Into a folder of its own: what `mkdocs build` leaves in site/ stays as it is.
site() {
    local folder status
    folder=$(mktemp -d) || return
    NO_MKDOCS_2_WARNING=1 "$bin/mkdocs" build --strict --site-dir "$folder/site"
    status=$?
    rm -r "$folder"
    return $status
}

step floors "$bin/python" -m pytest -q tests/test_floors.py tests/test_imports.py
step site site
if ((${#failed[@]})); then
    printf 'check: failed: %s\n' "${failed[*]}" >&2
    exit 1
fi
