#!/usr/bin/env bash
# Makes the Python environment of megatron_epp; a second run returns at once.
#
#   bash scripts/setup_env.sh [--gpu]
#
# A virtual environment with Python 3.12 at .venv (or $EPP_VENV), requirements.txt in it and requirements-te.txt beside its
# packages; --gpu adds Transformer Engine (requirements-gpu.txt), which is compiled here: that wants an NVIDIA driver of 580 or newer, as torch is built for CUDA 13,
# and a CUDA 13 toolkit (nvcc on PATH, CUDA_HOME, or /usr/local/cuda). Python 3.12 is looked for on PATH, among pyenv's versions and through uv.
# Exit status: 0 ready; 2 no Python 3.12, a wrong flag, a driver or a toolkit that will not do; otherwise the installer's.
set -euo pipefail

# Builtins only until a Python is found: the one line below must come out even where PATH leads nowhere.
here=${BASH_SOURCE[0]%/*}
[[ $here == "${BASH_SOURCE[0]}" ]] && here=.
cd "$here/.."

fail() { printf 'setup_env: %s\n' "$1" >&2; exit 2; }

gpu=false
for flag in "$@"; do
    case $flag in
        --gpu) gpu=true ;;
        *) fail "unknown flag $flag; usage: bash scripts/setup_env.sh [--gpu]" ;;
    esac
done

venv=${EPP_VENV:-.venv}
python=$venv/bin/python
# The stamp is the text of what was installed, written last: an interrupted installation has none.
stamp=$venv/.epp-installed
wanted="$(<requirements.txt)"$'\n'"$(<requirements-te.txt)"
wanted_gpu="$wanted"$'\n'"$(<requirements-gpu.txt)"

if [[ -x $python && -f $stamp ]]; then
    installed=$(<"$stamp")
    if [[ $installed == "$wanted_gpu" ]] || { ! $gpu && [[ $installed == "$wanted" ]]; }; then
        exit 0
    fi
fi

# Before gigabytes are fetched. Only what is there and too old is refused: one may install where no GPU is.
least_driver=580 least_toolkit=13
if $gpu; then
    smi=$(type -P nvidia-smi || true)
    if [[ -n $smi ]] && found=$("$smi" --query-gpu=driver_version --format=csv,noheader 2>/dev/null); then
        driver=${found%%$'\n'*}
        if [[ ${driver%%.*} =~ ^[0-9]+$ ]] && ((${driver%%.*} < least_driver)); then
            fail "NVIDIA driver $driver: torch for CUDA 13 needs $least_driver or newer; update the driver first"
        fi
    fi
    if [[ -z ${CUDA_HOME:-} ]]; then
        nvcc=$(type -P nvcc || true)
        if [[ -n $nvcc ]]; then
            export CUDA_HOME=${nvcc%/bin/nvcc}
        elif [[ -d /usr/local/cuda ]]; then
            export CUDA_HOME=/usr/local/cuda
        else
            fail "Transformer Engine is compiled here and needs a CUDA 13 toolkit; set CUDA_HOME to it"
        fi
    fi
    [[ -x $CUDA_HOME/bin/nvcc ]] ||
        fail "CUDA_HOME=$CUDA_HOME: no bin/nvcc there; Transformer Engine needs a CUDA 13 toolkit, set CUDA_HOME to it"
    version=$("$CUDA_HOME/bin/nvcc" --version) || fail "$CUDA_HOME/bin/nvcc does not run"
    if [[ $version =~ release\ ([0-9]+)\.([0-9]+) ]] && ((BASH_REMATCH[1] < least_toolkit)); then
        fail "CUDA_HOME=$CUDA_HOME holds CUDA ${BASH_REMATCH[1]}.${BASH_REMATCH[2]}; Transformer Engine for this torch needs $least_toolkit"
    fi
fi

is_python312() { # with venv and ensurepip: Debian's python3.12 comes without
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1
}

find_python312() { # prints the first that runs
    local candidate name root
    for name in python3.12 python3 python; do
        while IFS= read -r candidate; do
            if is_python312 "$candidate"; then printf '%s\n' "$candidate"; return 0; fi
        done < <(type -aP "$name" || true)
    done
    for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
        [[ -n $root ]] || continue
        for candidate in "$root"/versions/3.12*/bin/python; do
            if is_python312 "$candidate"; then printf '%s\n' "$candidate"; return 0; fi
        done
    done
    return 1
}

find_uv() {
    local candidate
    for candidate in "$(type -P uv || true)" "${HOME:-}/.local/bin/uv" "${HOME:-}/.cargo/bin/uv"; do
        if [[ -n $candidate && -x $candidate ]]; then printf '%s\n' "$candidate"; return 0; fi
    done
    return 1
}

uv=$(find_uv || true)
if [[ -x $python ]]; then
    "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' ||
        fail "$venv holds another Python than 3.12; remove it, or name another place in EPP_VENV"
elif base=$(find_python312); then
    printf 'setup_env: making %s with %s\n' "$venv" "$base" >&2
    "$base" -m venv "$venv"
elif [[ -n $uv ]]; then
    printf 'setup_env: making %s through %s\n' "$venv" "$uv" >&2
    "$uv" venv --seed --python 3.12 "$venv" ||
        fail "no Python 3.12 on PATH or among pyenv's versions, and uv could not provide one; install Python 3.12"
else
    fail "no Python 3.12 found on PATH, among pyenv's versions or through uv; install one (for instance: uv python install 3.12)"
fi

install() { # progress goes to stderr, so that callers may read our stdout
    if [[ -n $uv ]]; then
        "$uv" pip install --python "$python" "$@" >&2
    else
        "$python" -m pip install --disable-pip-version-check "$@" >&2
    fi
}

printf 'setup_env: installing requirements.txt into %s (torch with CUDA: a few GB)\n' "$venv" >&2
install -r requirements.txt
install --no-deps --upgrade --target "$venv/te_on_cpu" -r requirements-te.txt # why there: requirements-te.txt

if $gpu; then
    # Why each of these: requirements-gpu.txt.
    packages=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["platlib"])')
    headers=$packages/nvidia/cu13/include:$packages/nvidia/nccl/include:$packages/nvidia/cudnn/include
    export CPATH=$headers${CPATH:+:$CPATH} NVTE_FRAMEWORK=pytorch
    printf 'setup_env: compiling Transformer Engine with CUDA_HOME=%s (20 minutes on two cores)\n' "$CUDA_HOME" >&2
    install setuptools wheel packaging ninja
    install --no-build-isolation -r requirements-gpu.txt
    printf '%s' "$wanted_gpu" >"$stamp"
else
    printf '%s' "$wanted" >"$stamp"
fi
printf 'setup_env: %s is ready\n' "$venv" >&2
