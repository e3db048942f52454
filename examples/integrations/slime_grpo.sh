#!/usr/bin/env bash
# slime's own script for Qwen3-4B, at level 0. (Stages, --pipeline-model-parallel-size, are set in it.)
#
#   python -m pip install <a checkout of megatron_epp>
#   SLIME=<a checkout of slime> bash slime_grpo.sh
#
# It starts Ray itself, so that its workers have the variable. For a cluster of your own, put it into
# the "env_vars" of --runtime-env-json.
set -euo pipefail
cd "${SLIME:?a checkout of slime}"
export MEGATRON_EPP=1 # the line
exec bash scripts/run-qwen3-4B.sh
