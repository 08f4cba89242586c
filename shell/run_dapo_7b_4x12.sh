#!/usr/bin/env bash
# DAPO-style training of a 7B model on 16 GPUs, 4 that generate and 12 that train: config/dapo_7b.yaml.
#
#   RAY_ADDRESS=HOST:PORT   a running Ray cluster of two nodes with 8 GPUs each (docs/tutorials/many_gpus.md); must be set
#   MODEL=DIR_OR_HUB_ID     another model
#   DATA=FILE_OR_HUB_ID     other training data
#   VAL=FILE_OR_HUB_ID      a held-out set, evaluated every 10 steps (default: none)
#
# Arguments go to the program, as in: shell/run_dapo_7b_4x12.sh trainer.total_steps=20 --dry-run
# All paths are relative to the working directory, and so is the run folder, outputs/...
# Not run on such a cluster yet; the tests check the command that it starts.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

if [[ -z "${RAY_ADDRESS:-}" ]]; then
    echo "run_dapo_7b_4x12: error: RAY_ADDRESS is not set: 16 GPUs on two nodes need a Ray cluster;" \
        "start one as in docs/tutorials/many_gpus.md and give its HOST:PORT" >&2
    exit 2
fi

EXTRA=gpu "$root/shell/setup.sh"
args=("config=$root/config/dapo_7b.yaml")
if [[ -n "${MODEL:-}" ]]; then args+=("model.path=$MODEL"); fi
if [[ -n "${DATA:-}" ]]; then args+=("data.train_files=$DATA"); fi
if [[ -n "${VAL:-}" ]]; then args+=("data.val_files=$VAL" trainer.test_freq=10); fi
# -P: a folder in the working directory that is named like one of our packages must not shadow it.
exec "$root/.venv-gpu/bin/python" -P -m one_step_off.main_ppo "${args[@]}" "$@"
