#!/usr/bin/env bash
# Megatron-core on several nodes, half of whose GPUs generate: config/qwen_gsm8k_megatron.yaml with other sizes.
#
#   SIZE=7b                 a dense 7B on 16 GPUs of two nodes; of those that train four share each layer (default)
#   SIZE=30b                Qwen3-30B-A3B on 32 GPUs of four nodes; two stages, in each of which eight share the experts
#   RAY_ADDRESS=HOST:PORT   a running Ray cluster of so many nodes with 8 GPUs each (docs/tutorials/many_gpus.md); must be set
#   MODEL=DIR_OR_HUB_ID     another model
#
# Arguments go to the program. Not run on such a cluster yet.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
size="${SIZE:-7b}"

case "$size" in
    7b) model=Qwen/Qwen2.5-7B-Instruct nodes=two args=("placement.pools={rollout: [8], actor: [8]}"
        actor.tensor_parallel_size=4) ;;
    30b) model=Qwen/Qwen3-30B-A3B nodes=four args=("placement.pools={rollout: [8, 8], actor: [8, 8]}"
        rollout.tensor_parallel_size=4 actor.tensor_parallel_size=1 actor.sequence_parallel=false
        actor.pipeline_parallel_size=2 actor.expert_parallel_size=8) ;;
    *)
        echo "run_megatron_nodes: error: SIZE=$size: must be 7b or 30b" >&2
        exit 2
        ;;
esac
if [[ -z "${RAY_ADDRESS:-}" ]]; then
    echo "run_megatron_nodes: error: RAY_ADDRESS is not set: SIZE=$size needs a Ray cluster of $nodes nodes;" \
        "start one as in docs/tutorials/many_gpus.md and give its HOST:PORT" >&2
    exit 2
fi

EXTRA=gpu MEGATRON=1 "$root/shell/setup.sh"
exec "$root/.venv-gpu/bin/python" -P -m one_step_off.main_ppo "config=$root/config/qwen_gsm8k_megatron.yaml" \
    "model.path=${MODEL:-$model}" "${args[@]}" actor.activation_checkpointing=true weight_sync.timeout_s=600 \
    "trainer.output_dir=outputs/megatron_$size" "$@"
