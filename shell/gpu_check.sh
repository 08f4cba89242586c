#!/usr/bin/env bash
# Checks a machine: devices, process groups, weight transfer, engine, speed, and a short run of each arrangement that its
# GPUs allow. Under fifteen minutes. Each check is on its own: one that hangs or crashes is reported, and the others run.
# Prints a line per check, and writes gpu_report.md, to attach to an issue (docs/tutorials/first_hour_on_gpus.md).
#
#   EXTRA=cpu|gpu   the venv to use, regardless of what this machine has
#   MEGATRON=1      install Megatron-core too, for the check that needs it
#
# Arguments go to the program:
#   --device cpu|cuda    default: cuda where there are GPUs
#   --out DIR            default: outputs/gpu_check, below the working directory
#   --only NAME ...      these checks alone; --list prints them
#   --model PATH         a Hugging Face model directory, instead of a random model
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
words=" $* "
if [[ "$words" == *" --device cpu "* || "$words" == *" --device=cpu "* ]]; then
    export EXTRA="${EXTRA:-cpu}"
elif [[ "$words" == *" --device cuda "* || "$words" == *" --device=cuda "* ]]; then
    export EXTRA="${EXTRA:-gpu}"
fi
export MIN_GPUS=1
venv="$("$root/shell/setup.sh" --print-venv)"
on=cpu
[[ "$venv" != *-gpu ]] || on=gpu
EXTRA="$on" "$root/shell/setup.sh"
exec "$venv/bin/python" -P -m one_step_off.gpu_check "$@"
