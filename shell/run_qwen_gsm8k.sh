#!/usr/bin/env bash
# Trains on GSM8K: Qwen2.5-0.5B-Instruct on GPUs, or a tiny model on word problems where there is no GPU.
#
#   MODEL=DIR_OR_HUB_ID   another model
#   DATA=SOURCE           a hub id, a file for training, or a folder with gsm8k_train.jsonl and gsm8k_test.jsonl
#   N_ROLLOUT_GPUS=N      GPUs that generate (default: half of them); the others train
#
# Arguments go to the program, as in: shell/run_qwen_gsm8k.sh trainer.total_steps=20 --dry-run
set -euo pipefail

# Paths are meant from where the user stands, and we are about to leave it.
absolute() {
    if [[ -e "$1" ]]; then realpath -- "$1"; else echo "$1"; fi
}
MODEL="$(absolute "${MODEL:-}")"
DATA="$(absolute "${DATA:-}")"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() {
    echo "run_qwen_gsm8k: error: $*" >&2
    exit 2
}

shell/setup.sh
gpus="$(.venv/bin/python -c 'from one_step_off.cores import count_gpus; print(count_gpus())')"
if ((gpus == 0)); then
    echo "run_qwen_gsm8k: no GPU here: training a tiny model on the CPU (config/gsm8k_tiny_cpu.yaml)"
    args=(config=config/gsm8k_tiny_cpu.yaml)
elif ((gpus == 1)); then
    die "found 1 GPU, needs 2: generation and training run at the same time, each on its own." \
        "For the CPU run: CUDA_VISIBLE_DEVICES= shell/run_qwen_gsm8k.sh"
else
    rollout="${N_ROLLOUT_GPUS:-$((gpus / 2))}"
    if ! [[ "$rollout" =~ ^[1-9][0-9]{0,3}$ ]] || ((rollout >= gpus)); then
        die "N_ROLLOUT_GPUS=$rollout: must be 1 to $((gpus - 1)), so that some of the $gpus GPUs are left to train"
    fi
    args=(config=config/qwen_gsm8k_fsdp.yaml "placement.pools={rollout: [$rollout], actor: [$((gpus - rollout))]}")
fi

if [[ -n "$MODEL" ]]; then
    args+=("model.path=$MODEL")
fi
if [[ -n "$DATA" ]]; then
    if [[ -d "$DATA" ]]; then
        args+=("data.train_files=$DATA/gsm8k_train.jsonl" "data.val_files=$DATA/gsm8k_test.jsonl")
    elif [[ -f "$DATA" ]]; then
        # One file holds no held-out set: its own rows would only look like one.
        args+=("data.train_files=$DATA" data.val_files= trainer.test_freq=-1)
    else
        args+=("data.train_files=$DATA" "data.val_files=$DATA")
    fi
fi
exec .venv/bin/python -m one_step_off.main_ppo "${args[@]}" "$@"
