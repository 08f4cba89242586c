#!/usr/bin/env bash
# Trains a tiny vision-language model to count coloured shapes, on the CPU (config/shapes_tiny_cpu.yaml).
#
# Arguments go to the program, as in: shell/run_shapes.sh trainer.total_steps=5
# All paths are relative to the working directory, and so is the run folder, outputs/shapes_tiny_cpu.
set -euo pipefail

export EXTRA=cpu # vLLM's CUDA build cannot serve this config, also on a machine with GPUs
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$("$root/shell/setup.sh" --print-venv)"
"$root/shell/setup.sh"
# -P: a folder in the working directory that is named like one of our packages must not shadow it.
exec "$venv/bin/python" -P -m one_step_off.main_ppo "config=$root/config/shapes_tiny_cpu.yaml" "$@"
