#!/usr/bin/env bash
# A dense 7B with Megatron-core on 16 GPUs, 8 that generate and 8 that train, four of which share each layer:
# config/qwen_gsm8k_megatron.yaml with other sizes.
#
#   RAY_ADDRESS=HOST:PORT   a running Ray cluster of two nodes with 8 GPUs each (docs/multinode.md); must be set
#   MODEL=DIR_OR_HUB_ID     another model
#
# Arguments go to the program. Not run on such a cluster yet.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

if [[ -z "${RAY_ADDRESS:-}" ]]; then
    echo "run_megatron_7b_tp: error: RAY_ADDRESS is not set: 16 GPUs on two nodes need a Ray cluster;" \
        "start one as in docs/multinode.md and give its HOST:PORT" >&2
    exit 2
fi

EXTRA=gpu MEGATRON=1 "$root/shell/setup.sh"
exec "$root/.venv-gpu/bin/python" -P -m one_step_off.main_ppo "config=$root/config/qwen_gsm8k_megatron.yaml" \
    "model.path=${MODEL:-Qwen/Qwen2.5-7B-Instruct}" \
    "placement.pools={rollout: [8], actor: [8]}" \
    actor.tensor_parallel_size=4 actor.activation_checkpointing=true \
    trainer.output_dir=outputs/megatron_7b "$@"
