#!/usr/bin/env bash
# Lint, format and tests. Arguments go to pytest, as in: shell/test.sh -m slow tests/test_config.py
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
shell/setup.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
exec .venv/bin/python -m pytest "$@"
