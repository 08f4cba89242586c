#!/usr/bin/env bash
# Trains on GSM8K: Qwen2.5-0.5B-Instruct on two or more GPUs, else a tiny model on word problems, on the CPU.
#
#   MODEL=DIR_OR_HUB_ID   another model
#   DATA=SOURCE           a hub id, a file for training (or several with commas), or a folder with gsm8k_train.jsonl
#                         and gsm8k_test.jsonl
#   N_ROLLOUT_GPUS=N      GPUs that generate (default: half of them); the others train
#   BACKEND=megatron      train with Megatron-core instead of FSDP2; two ranks share each layer (needs 3 GPUs; on
#                         the CPU two processes train a tiny Qwen3)
#   EXTRA=cpu|gpu         use the CPU or GPUs, regardless of what this machine has
#
# Arguments go to the program, as in: shell/run_qwen_gsm8k.sh trainer.total_steps=20 --dry-run
# All paths are relative to the working directory, and so is the run folder, outputs/... A second run does not overwrite
# the first: its error names the choices, such as trainer.overwrite=true.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

say() {
    echo "run_qwen_gsm8k: $*"
}

die() {
    echo "run_qwen_gsm8k: error: $*" >&2
    exit 2
}

backend="${BACKEND:-fsdp}"
[[ "$backend" == fsdp || "$backend" == megatron ]] || die "BACKEND=$backend: must be fsdp or megatron"
[[ "$backend" == fsdp ]] || export MEGATRON=1 # for setup.sh
data="${DATA:-}"
files='\.(jsonl|json|parquet)[[:space:]]*(,|$)'
hub='^[A-Za-z0-9_.-]*[A-Za-z0-9_-](/[A-Za-z0-9_.-]+)?(:[A-Za-z0-9_.-]+)?$' # generator:NAME looks the same
if [[ -n "$data" && ! -e "$data" && ! "$data" =~ $files && ! "$data" =~ $hub ]]; then
    die "DATA=$data: no such folder or file, and no hub id as openai/gsm8k; check the path"
fi
venv="$("$root/shell/setup.sh" --print-venv)"
on=cpu
[[ "$venv" != *-gpu ]] || on=gpu
EXTRA="$on" "$root/shell/setup.sh"
# -P: a folder in the working directory that is named like one of our packages must not shadow it.
gpus="$("$venv/bin/python" -P -c 'from one_step_off.config.hardware import count_gpus; print(count_gpus())')"
if [[ "$on" == cpu ]]; then
    tiny="training a tiny model on the CPU (config/gsm8k_tiny_cpu.yaml)"
    case "$gpus" in
        0) say "no GPU here: $tiny" ;;
        1) say "found 1 GPU, but generation and training run at the same time, each on its own: $tiny" ;;
        *) say "EXTRA=cpu: $tiny" ;;
    esac
    args=("config=$root/config/gsm8k_tiny_cpu.yaml")
    if [[ "$backend" == megatron ]]; then # the tiny Qwen2 has one key-value head, which no two ranks can share
        args+=(model.path=tiny:qwen3 actor.backend=megatron actor.tensor_parallel_size=2)
        args+=("placement.pools={rollout: [1], actor: [2]}" trainer.output_dir=outputs/gsm8k_tiny_cpu_megatron)
    fi
elif ((gpus < 2)); then
    die "EXTRA=gpu: found $gpus GPU(s), needs 2: generation and training run at the same time, each on its own." \
        "Without EXTRA a tiny model is trained on the CPU"
else
    rollout="${N_ROLLOUT_GPUS:-$((gpus / 2))}"
    if [[ "$backend" == megatron ]]; then
        ((gpus >= 3)) || die "BACKEND=megatron: found $gpus GPUs, needs 3: one generates, two share each layer." \
            "Without BACKEND two are enough; with EXTRA=cpu a tiny model is trained on the CPU"
        # Training takes pairs.
        [[ -n "${N_ROLLOUT_GPUS:-}" ]] || rollout=$((rollout + (gpus - rollout) % 2))
    fi
    if ! [[ "$rollout" =~ ^[1-9][0-9]{0,3}$ ]] || ((rollout >= gpus)); then
        die "N_ROLLOUT_GPUS=$rollout: must be 1 to $((gpus - 1)), so that some of the $gpus GPUs are left to train"
    fi
    args=("config=$root/config/qwen_gsm8k_$backend.yaml")
    if [[ "$backend" == megatron ]] && (((gpus - rollout) % 2)); then
        die "BACKEND=megatron: trains on pairs of GPUs, and $((gpus - rollout)) are left to train; set N_ROLLOUT_GPUS to another number"
    fi
    args+=("placement.pools={rollout: [$rollout], actor: [$((gpus - rollout))]}")
fi

if [[ -n "${MODEL:-}" ]]; then
    args+=("model.path=$MODEL")
fi
if [[ -d "$data" ]]; then
    args+=("data.train_files=$data/gsm8k_train.jsonl" "data.val_files=$data/gsm8k_test.jsonl")
elif [[ -f "$data" || "$data" =~ $files ]]; then
    # Files hold no held-out set: their own rows would only look like one.
    args+=("data.train_files=$data" data.val_files= trainer.test_freq=-1)
elif [[ -n "$data" ]]; then
    # Hub ids and generators have a split for each.
    args+=("data.train_files=$data" "data.val_files=$data")
fi
exec "$venv/bin/python" -P -m one_step_off.main_ppo "${args[@]}" "$@"
