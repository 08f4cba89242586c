#!/usr/bin/env bash
# Lint, format, import layers, types and tests, those of Megatron too. Arguments go to pytest, as in: shell/test.sh -m slow tests/unit/config/test_config.py
#
# The tests run on CPUs with vLLM's CPU build, even on a machine with GPUs. Tests that need a GPU are skipped then; they
# run in the other venv: EXTRA=gpu shell/test.sh -m gpu (MEGATRON=1 too, for those with Transformer Engine)
#
# TEST_WORKERS=N: test files that run at the same time (default: 2, and 0 on GPUs, which two tests cannot share). With 0 the
# tests run in pytest's own process, as --pdb needs it.
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
[[ "$EXTRA" == gpu ]] && workers=0 || workers=2
# The tests start hundreds of processes. Without this each of them compiles the modules that it imports.
unset PYTHONDONTWRITEBYTECODE
# A file's tests stay together, since they share engines and models. In their order the folders with long ones begin first
# (tests/conftest.py).
exec "$bin/python" -m pytest -n "${TEST_WORKERS:-$workers}" --dist loadfile --no-loadscope-reorder "$@"
