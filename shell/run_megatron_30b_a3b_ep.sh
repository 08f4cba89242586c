#!/usr/bin/env bash
# Qwen3-30B-A3B with Megatron-core on 32 GPUs, 16 that generate and 16 that train, eight of which share the experts:
# config/qwen_gsm8k_megatron.yaml with other sizes.
#
#   RAY_ADDRESS=HOST:PORT   a running Ray cluster of four nodes with 8 GPUs each (docs/multinode.md); must be set
#   MODEL=DIR_OR_HUB_ID     another model
#
# Arguments go to the program. Not run on such a cluster yet.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

if [[ -z "${RAY_ADDRESS:-}" ]]; then
    echo "run_megatron_30b_a3b_ep: error: RAY_ADDRESS is not set: 32 GPUs on four nodes need a Ray cluster;" \
        "start one as in docs/multinode.md and give its HOST:PORT" >&2
    exit 2
fi

EXTRA=gpu MEGATRON=1 "$root/shell/setup.sh"
exec "$root/.venv-gpu/bin/python" -P -m one_step_off.main_ppo "config=$root/config/qwen_gsm8k_megatron.yaml" \
    "model.path=${MODEL:-Qwen/Qwen3-30B-A3B}" \
    "placement.pools={rollout: [8, 8], actor: [8, 8]}" rollout.tensor_parallel_size=4 \
    actor.tensor_parallel_size=1 actor.sequence_parallel=false \
    actor.pipeline_parallel_size=2 actor.expert_parallel_size=8 actor.activation_checkpointing=true \
    trainer.output_dir=outputs/megatron_30b_a3b "$@"
