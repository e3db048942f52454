#!/usr/bin/env bash
# verl's own GRPO recipe over Megatron, in slices (verl_slices.py).
#
#   python -m pip install <a checkout of megatron_epp>   (where it runs by uv: uv pip install ...)
#   VERL=<a checkout of verl> ACTOR_PP=4 bash verl_grpo.sh [overrides]
#
# Ray starts inside of the script, so that its workers have the variables. For a cluster of your own,
# export them before `ray start`.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "${VERL:?a checkout of verl}"
export PYTHONPATH="$HERE${PYTHONPATH:+:$PYTHONPATH}"
export VERL_USE_EXTERNAL_MODULES=verl_slices VERL_ENGINE_VENDOR=megatron_epp
exec bash examples/grpo_trainer/run_qwen3_8b_megatron.sh "$@"
