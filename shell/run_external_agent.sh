#!/usr/bin/env bash
# Trains a tiny model through an agent of the openai-agents SDK, on the CPU (config/external_agent.yaml).
# The SDK is installed into a venv of its own, .venv-agents, so that its packages do not meet those of the run.
#
#   AGENT_PYTHON=PATH     a Python interpreter that has the SDK; nothing is installed then
#
# Arguments go to the program, as in: shell/run_external_agent.sh trainer.total_steps=5
# All paths are relative to the working directory, and so is the run folder, outputs/external_agent.
set -euo pipefail

export EXTRA=cpu # vLLM's CUDA build cannot serve this config, also on a machine with GPUs
sdk="openai-agents>=0.24,<0.25"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$("$root/shell/setup.sh" --print-venv)"
"$root/shell/setup.sh"

agent_python="${AGENT_PYTHON:-}"
if [[ -z "$agent_python" ]]; then
    agent_venv="$root/.venv-agents"
    agent_python="$agent_venv/bin/python"
    if [[ "$(cat "$agent_venv/.setup-done" 2>/dev/null)" != "$sdk" ]]; then
        echo "setup: $sdk in ${agent_venv##*/} ..."
        "$venv/bin/python" -m venv --clear "$agent_venv"
        "$agent_python" -m pip install --quiet --disable-pip-version-check --no-input "$sdk"
        echo "$sdk" >"$agent_venv/.setup-done"
    fi
fi
# Where the agent's module is.
export PYTHONPATH="$root/examples/agents${PYTHONPATH:+:$PYTHONPATH}"
# -P: a folder in the working directory that is named like one of our packages must not shadow it.
exec "$venv/bin/python" -P -m one_step_off.main_ppo "config=$root/config/external_agent.yaml" \
    "agent.python=$agent_python" "$@"
