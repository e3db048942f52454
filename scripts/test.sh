#!/usr/bin/env bash
# Installs what is missing, then runs the checks and the first tier of tests (tests/TIERS.md).
# Other arguments go to pytest:  bash scripts/test.sh -k documents
exec bash "$(dirname "${BASH_SOURCE[0]}")/tiers.sh" first "$@"
