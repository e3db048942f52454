#!/usr/bin/env bash
# The planning half, installed as a wheel, where others' packages and another Python are:
#
#   bash scripts/ranges.sh [FOLDER]      # environments go there and stay (.ranges); a second run makes no new ones
#
#   oldest       Python 3.12 with the lowest numpy, numba, highspy and tqdm that pyproject.toml allows
#   3.13         Python 3.13 with the newest; left out, and said so, where this machine has none
#   numpy-1.26   Python 3.12 with numpy 1.26.4 alone, as frameworks' images have it: what pip then brings must go with it
#
# pip may change nothing that is there; torch is nowhere. Each runs some of the planners' tests, golden plans byte for byte
# among them (numpy-1.26 those alone), with the bounds of compiled code checked. Exit status: 0 all passed, 1 something failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$PWD/.ranges
(($# == 0)) || { mkdir -p "$1" && folder=$(cd "$1" && pwd); }
mkdir -p "$folder"
python=$PWD/.venv/bin/python
[[ -z ${EPP_VENV:-} ]] || python=$EPP_VENV/bin/python
export OMP_NUM_THREADS=1 PIP_DISABLE_PIP_VERSION_CHECK=1

built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT
wheel=$("$python" scripts/wheels.py "$built")

lowest=$("$python" - <<'EOF'
import re, tomllib
for asked in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]:
    print(re.fullmatch(r"([\w-]+)>=([\d.]+)(,<\d+)?", asked).expand(r"\1==\2"))
EOF
)

find_python313() { # prints the first that runs and can make environments
    local candidate
    while IFS= read -r candidate; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 13))' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done < <(type -aP python3.13; ls -d {"${PYENV_ROOT:-}","${HOME:-}/.pyenv"}/versions/3.13*/bin/python 2>/dev/null)
    return 1
}

# try NAME PYTHON TESTS PACKAGE...: its output goes to FOLDER/NAME.log
try() {
    local name=$1 base=$2 tests=$3 there before changed
    shift 3
    there=$folder/$name
    [[ -x $there/bin/pytest ]] ||
        { rm -rf "$there" && "$base" -m venv "$there" && "$there/bin/pip" install -q "$@" pytest hypothesis; } || return 1
    "$there/bin/pip" uninstall -q -y megatron-epp 2>/dev/null
    before=$("$there/bin/pip" freeze)
    "$there/bin/pip" install -q "$wheel" || return 1
    changed=$(comm -23 <(sort <<<"$before") <("$there/bin/pip" freeze | sort))
    if [[ -n $changed ]]; then
        printf 'installing the wheel changed packages that were there:\n%s\n' "$changed"
        return 1
    fi
    "$there/bin/pip" check || return 1
    if "$there/bin/python" -c 'import torch' 2>/dev/null; then
        echo "torch is there: nothing here would show that planning needs it"
        return 1
    fi
    (cd "$there" && bin/megatron-epp --version) || return 1
    # shellcheck disable=SC2086  # a word is a file
    NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$there/numba-checked "$there/bin/python" -m pytest -q -p no:cacheprovider $tests \
        -k "not is_fast and (not golden_one or 0-)"
}

golden=tests/planner/test_golden.py
all="tests/ir/test_text.py tests/sim/test_play.py tests/corpus tests/planner/test_placed_schedules.py $golden"
names=(oldest numpy-1.26) failed=()
# shellcheck disable=SC2086  # a line is a package
try oldest "$python" "$all" $lowest >"$folder/oldest.log" 2>&1 &
jobs=($!)
try numpy-1.26 "$python" "$golden" numpy==1.26.4 >"$folder/numpy-1.26.log" 2>&1 &
jobs+=($!)
if base=$(find_python313); then
    names+=(3.13)
    try 3.13 "$base" "$all" numpy numba highspy tqdm >"$folder/3.13.log" 2>&1 &
    jobs+=($!)
else
    echo "ranges: no Python 3.13 on this machine: left out"
fi
for i in "${!names[@]}"; do
    name=${names[i]}
    wait "${jobs[i]}" || failed+=("$name")
    printf 'ranges: %s, %s\n' "$name" "$("$folder/$name/bin/pip" freeze 2>/dev/null | grep -E '^(numpy|numba|highspy|tqdm)=' | paste -sd' ')"
    if [[ " ${failed[*]:-} " == *" $name "* ]]; then cat "$folder/$name.log"; else tail -2 "$folder/$name.log"; fi
done
if ((${#failed[@]})); then
    printf 'ranges: failed: %s\n' "${failed[*]}" >&2
    exit 1
fi
