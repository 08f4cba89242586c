#!/usr/bin/env bash
# Trains on GSM8K: Qwen2.5-0.5B-Instruct on GPUs, else a tiny model on word problems, on the CPU.
#
# With two or more GPUs generation and training have GPUs of their own. With one GPU they share it, half of its memory
# each. Where the trainer has less than 36 GB it recomputes activations, and below 15 GB its optimizer is in host memory:
# by calculation 24 GB are enough for both (not tried yet).
#
#   MODEL=DIR_OR_HUB_ID   another model
#   DATA=SOURCE           a hub id, a file for training (or several with commas), or a folder with gsm8k_train.jsonl
#                         and gsm8k_test.jsonl
#   N_ROLLOUT_GPUS=N      GPUs that generate (default: half of them); the others train
#   ONE_GPU=colocated     with one GPU: generate and train one after the other (synchronous); the engine sleeps while
#                         the trainer works (default: shared: both at once, one step off)
#   BACKEND=megatron      train with Megatron-core instead of FSDP2; with 3 GPUs or more, and on the CPU, two ranks share
#                         each layer (on the CPU of a tiny Qwen3)
#   EXTRA=cpu|gpu         use the CPU or GPUs, regardless of what this machine has
#
# Arguments go to the program, as in: shell/run_qwen_gsm8k.sh trainer.total_steps=20 --dry-run
# All paths are relative to the working directory, and so is the run folder, outputs/... A second run does not overwrite
# the first: its error names the choices, such as trainer.overwrite=true.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

say() {
    echo "run_qwen_gsm8k: $*" || true # a console that fails ends no run
}

die() {
    echo "run_qwen_gsm8k: error: $*" >&2
    exit 2
}

# MiB of the smallest GPU; 0: nvidia-smi does not tell.
gpu_memory() {
    local sizes
    sizes="$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | grep -E '^[0-9]+$' || true)"
    echo "${sizes:-0}" | sort -n | head -1
}

backend="${BACKEND:-fsdp}"
[[ "$backend" == fsdp || "$backend" == megatron ]] || die "BACKEND=$backend: must be fsdp or megatron"
[[ "$backend" == fsdp ]] || export MEGATRON=1 # for setup.sh
one_gpu="${ONE_GPU:-shared}"
[[ "$one_gpu" == shared || "$one_gpu" == colocated ]] || die "ONE_GPU=$one_gpu: must be shared or colocated"
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
        *) say "EXTRA=cpu: $tiny" ;;
    esac
    args=("config=$root/config/gsm8k_tiny_cpu.yaml")
    if [[ "$backend" == megatron ]]; then # the tiny Qwen2 has one key-value head, which no two ranks can share
        args+=(model.path=tiny:qwen3 actor.backend=megatron actor.tensor_parallel_size=2)
        args+=("placement.pools={rollout: [1], actor: [2]}" trainer.output_dir=outputs/gsm8k_tiny_cpu_megatron)
    fi
elif ((gpus < 1)); then
    die "EXTRA=gpu: found no GPU. Without EXTRA a tiny model is trained on the CPU"
elif ((gpus == 1)); then
    [[ -z "${N_ROLLOUT_GPUS:-}" ]] || die "N_ROLLOUT_GPUS=$N_ROLLOUT_GPUS: there is one GPU, which both share; leave it out"
    args=("config=$root/config/qwen_gsm8k_$backend.yaml")
    if [[ "$one_gpu" == shared ]]; then
        say "found 1 GPU: generation and training share it, half of its memory each"
        args+=("placement.pools={rollout: [0.5], actor: [0.5]}")
    else
        say "found 1 GPU: it generates and trains one after the other (synchronous)"
        args+=("placement.pools={all: [1]}" "placement.roles={rollout: all, actor: all}" pipeline.staleness=0)
        # The trainer keeps its weights and optimizer on the GPU while the engine is awake.
        args+=(rollout.gpu_memory_utilization=0.5)
    fi
else
    rollout="${N_ROLLOUT_GPUS:-$((gpus / 2))}"
    if [[ "$backend" == megatron ]] && ((gpus >= 3)); then
        # Training takes pairs.
        [[ -n "${N_ROLLOUT_GPUS:-}" ]] || rollout=$((rollout + (gpus - rollout) % 2))
    fi
    if ! [[ "$rollout" =~ ^[1-9][0-9]{0,3}$ ]] || ((rollout >= gpus)); then
        die "N_ROLLOUT_GPUS=$rollout: must be 1 to $((gpus - 1)), so that some of the $gpus GPUs are left to train"
    fi
    args=("config=$root/config/qwen_gsm8k_$backend.yaml")
    if [[ "$backend" == megatron ]] && ((gpus >= 3 && (gpus - rollout) % 2)); then
        die "BACKEND=megatron: trains on pairs of GPUs, and $((gpus - rollout)) are left to train; set N_ROLLOUT_GPUS to another number"
    fi
    args+=("placement.pools={rollout: [$rollout], actor: [$((gpus - rollout))]}")
fi
if [[ "$on" == gpu ]]; then
    trainer_memory="$(gpu_memory)"
    ((gpus > 1)) || [[ "$one_gpu" == colocated ]] || trainer_memory=$((trainer_memory / 2))
    if ((trainer_memory > 0 && trainer_memory < 37000)); then
        args+=(actor.activation_checkpointing=true actor.log_prob_chunk=512)
        [[ "$backend" == megatron ]] || ((trainer_memory >= 15000)) || args+=(actor.optimizer_offload=true)
    fi
fi
if [[ "$on" == gpu && "$backend" == megatron ]] && ((gpus < 3)); then # a single rank trains
    args+=(actor.tensor_parallel_size=1 actor.sequence_parallel=false)
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
