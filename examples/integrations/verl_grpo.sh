#!/usr/bin/env bash
# verl's own GRPO recipe over Megatron, at level 0.
#
#   python -m pip install <a checkout of megatron_epp>   (where it runs by uv: uv pip install ...)
#   VERL=<a checkout of verl> ACTOR_PP=4 bash verl_grpo.sh [overrides]
#
# Ray starts inside of the script, so that its workers have the variable. For a cluster of your own,
# export it before `ray start`, or add the override
#   +ray_kwargs.ray_init.runtime_env.env_vars.MEGATRON_EPP="'1'"
set -euo pipefail
cd "${VERL:?a checkout of verl}"
export MEGATRON_EPP=1 # the line
exec bash examples/grpo_trainer/run_qwen3_8b_megatron.sh "$@"
