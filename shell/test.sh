#!/usr/bin/env bash
# Lint, format and tests, those of Megatron too. Arguments go to pytest, as in: shell/test.sh -m slow tests/test_config.py
#
# The tests run on CPUs with vLLM's CPU build, also on a machine with GPUs. Those that need a GPU are skipped then; they
# run in the other venv: EXTRA=gpu shell/test.sh -m gpu
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export EXTRA="${EXTRA:-cpu}" MEGATRON="${MEGATRON-1}" # empty: without Megatron
shell/setup.sh
bin="$(shell/setup.sh --print-venv)/bin"
"$bin/ruff" check .
"$bin/ruff" format --check .
exec "$bin/python" -m pytest "$@"
