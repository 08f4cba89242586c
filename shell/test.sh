#!/usr/bin/env bash
# Lint, format, import layers, types and tests, those of Megatron too. Arguments go to pytest, as in: shell/test.sh -m slow tests/unit/config/test_config.py
#
# The tests run on CPUs with vLLM's CPU build, even on a machine with GPUs. Tests that need a GPU are skipped then; they
# run in the other venv: EXTRA=gpu shell/test.sh -m gpu (MEGATRON=1 too, for those with Transformer Engine)
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export EXTRA="${EXTRA:-cpu}"
# MEGATRON= leaves out Megatron's tests. On GPUs MEGATRON=1 must be set, because Transformer Engine is built then.
[[ "$EXTRA" == gpu ]] || export MEGATRON="${MEGATRON-1}"
shell/setup.sh
bin="$(shell/setup.sh --print-venv)/bin"
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/lint-imports" --no-cache --no-logo
"$bin/ty" check --python "$bin/python" --output-format concise
exec "$bin/python" -m pytest "$@"
