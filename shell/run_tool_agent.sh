#!/usr/bin/env bash
# Trains a tiny model to use a calculator, on the CPU (config/tool_agent.yaml).
#
#   MODEL=DIR_OR_HUB_ID   another model, with a chat template that accepts tools
#
# Arguments go to the program, as in: shell/run_tool_agent.sh trainer.total_steps=5 agent.tools=calculator,python
# All paths are relative to the working directory, and so is the run folder, outputs/tool_agent.
set -euo pipefail

export EXTRA=cpu # vLLM's CUDA build cannot serve this config, also on a machine with GPUs
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$("$root/shell/setup.sh" --print-venv)"
"$root/shell/setup.sh"
args=("config=$root/config/tool_agent.yaml")
if [[ -n "${MODEL:-}" ]]; then
    args+=("model.path=$MODEL" "agent.loop_kwargs={tool: {taught: false}}")
fi
# -P: a folder in the working directory that is named like one of our packages must not shadow it.
exec "$venv/bin/python" -P -m one_step_off.main_ppo "${args[@]}" "$@"
