#!/usr/bin/env bash
# Supervised fine-tuning on GSM8K: Qwen2.5-0.5B-Instruct on all GPUs (config/sft_qwen_gsm8k.yaml), else a tiny model on
# word problems, on the CPU (config/sft_tiny_cpu.yaml). OUTPUT_DIR/hf_model is then a model.path for RL.
#
#   MODEL=DIR_OR_HUB_ID   another model
#   DATA=FOLDER           a folder with gsm8k_train.jsonl and gsm8k_test.jsonl
#   EXTRA=cpu|gpu         use the CPU or GPUs, regardless of what this machine has
#
# Arguments go to the program, as in: shell/run_sft_gsm8k.sh trainer.total_steps=20 --dry-run
# All paths are relative to the working directory, and so is the run folder, outputs/...
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
data="${DATA:-}"
if [[ -n "$data" && ! -d "$data" ]]; then
    echo "run_sft_gsm8k: error: DATA=$data: no such folder; check the path, or give sft.train_files as an argument" >&2
    exit 2
fi
venv="$("$root/shell/setup.sh" --print-venv)"
on=cpu
[[ "$venv" != *-gpu ]] || on=gpu
EXTRA="$on" "$root/shell/setup.sh"
# -P: a folder in the working directory that is named like one of our packages must not shadow it.
gpus="$("$venv/bin/python" -P -c 'from one_step_off.config.hardware import count_gpus; print(count_gpus())')"
if [[ "$on" == cpu ]]; then
    echo "run_sft_gsm8k: training a tiny model on the CPU (config/sft_tiny_cpu.yaml)" || true
    args=("config=$root/config/sft_tiny_cpu.yaml")
elif ((gpus < 1)); then
    echo "run_sft_gsm8k: error: EXTRA=gpu: found no GPU. Without EXTRA a tiny model is trained on the CPU" >&2
    exit 2
else
    args=("config=$root/config/sft_qwen_gsm8k.yaml" "placement.pools={actor: [$gpus]}")
fi
if [[ -n "${MODEL:-}" ]]; then
    args+=("model.path=$MODEL")
fi
if [[ -n "$data" ]]; then
    args+=("data.train_files=$data/gsm8k_train.jsonl" "data.val_files=$data/gsm8k_test.jsonl")
fi
exec "$venv/bin/python" -P -m one_step_off.main_sft "${args[@]}" "$@"
