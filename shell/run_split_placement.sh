#!/usr/bin/env bash
# Full PPO with the critic in a pool of its own, so that actor and critic update at the same time: deepseek-llm-7b-chat
# on GSM8K where there are at least four GPUs (config/split_placement.yaml), else a tiny model on the CPU
# (config/ppo_gae.yaml with its roles split; one step off that takes three cores to be faster).
#
#   MODEL=DIR_OR_HUB_ID   another model
#   EXTRA=cpu|gpu         use the CPU or GPUs, regardless of what this machine has
#   RAY_ADDRESS=HOST:PORT several nodes: give placement.pools as an argument too (docs/tutorials/many_gpus.md)
#
# Arguments go to the program, as in: shell/run_split_placement.sh trainer.total_steps=20 --dry-run
# All paths are relative to the working directory, and so is the run folder, outputs/...
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
[[ -n "${RAY_ADDRESS:-}" ]] || export MIN_GPUS=4
venv="$("$root/shell/setup.sh" --print-venv)"
on=cpu
[[ "$venv" != *-gpu ]] || on=gpu
EXTRA="$on" "$root/shell/setup.sh"
# -P: a folder in the working directory that is named like one of our packages must not shadow it.
gpus="$("$venv/bin/python" -P -c 'from one_step_off.config.hardware import count_gpus; print(count_gpus())')"
if [[ "$on" == gpu && -n "${RAY_ADDRESS:-}" ]]; then
    args=("config=$root/config/split_placement.yaml")
elif [[ "$on" == gpu ]] && ((gpus >= 4)); then
    # A quarter generates, a quarter (at least one) holds the critic, the actor has the rest.
    quarter=$((gpus / 4))
    args=("config=$root/config/split_placement.yaml")
    args+=("placement.pools={rollout: [$quarter], actor: [$((gpus - 2 * quarter))], critic: [$quarter]}")
elif [[ "$on" == gpu ]]; then
    echo "run_split_placement: error: found $gpus GPUs, needs 4; EXTRA=cpu trains a tiny model on the CPU" >&2
    exit 2
else
    echo "run_split_placement: training a tiny model on the CPU (config/ppo_gae.yaml, actor and critic split)" || true
    args=("config=$root/config/ppo_gae.yaml" "trainer.output_dir=outputs/split_placement_cpu")
    args+=("placement.pools={rollout: [1], actor: [1], critic: [1]}")
    args+=("placement.roles={rollout: rollout, actor: actor, ref: actor, critic: critic}")
fi
if [[ -n "${MODEL:-}" ]]; then
    args+=("model.path=$MODEL")
fi
exec "$venv/bin/python" -P -m one_step_off.main_ppo "${args[@]}" "$@"
