#!/usr/bin/env bash
#SBATCH --job-name=one_step_off
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=04:00:00
#SBATCH --output=one_step_off-%j.log
#SBATCH --signal=B:USR1@180
#
# Qwen2.5-0.5B-Instruct on GSM8K under Slurm: a Ray cluster over the job's nodes, then the run on it, with the config
# config/qwen_gsm8k_fsdp.yaml.
# Submit it from the checkout, which all nodes must see at the same path, with its .venv-gpu
# (EXTRA=gpu shell/setup.sh):
#
#   sbatch shell/slurm_qwen_gsm8k.sh trainer.total_steps=100
#   sbatch --nodes=4 shell/slurm_qwen_gsm8k.sh
#
# A job that may be requeued needs checkpoints and a folder of its own; without trainer.overwrite=true it would be refused
# when it is requeued before its first checkpoint. It is not added here, since only you know whose the folder is.
#
#   sbatch --requeue shell/slurm_qwen_gsm8k.sh trainer.output_dir=outputs/my_job trainer.save_freq=10 trainer.overwrite=true
#
# 180 s before its time is up the job gets SIGUSR1, and the run ends its step, writes a checkpoint and ends; submitted again,
# the same command resumes. Give more time for longer steps, and set trainer.grace_s to it:
#
#   sbatch --signal=B:USR1@600 shell/slurm_qwen_gsm8k.sh trainer.grace_s=570
#
#   CONFIG=FILE       another config
#   POOLS=MAPPING     other pools (default: the first half of the nodes generates; on one node, half of its GPUs)
#   RAY_PORT=PORT     port of the cluster's head (default 6379)
#   RAY_WAIT_S=S      how long the nodes may take to join (default 180)
#
# Not run under a real Slurm yet; the tests run it with stand-ins for srun and Ray.
set -euo pipefail

die() {
    echo "slurm_qwen_gsm8k: error: $*" >&2
    exit 2
}

[[ -n "${SLURM_JOB_ID:-}" ]] || die "not inside a Slurm job; submit it with: sbatch shell/slurm_qwen_gsm8k.sh"
# Slurm runs a copy of this file from elsewhere, so its own path does not show where the checkout is.
cd "$SLURM_SUBMIT_DIR"
[[ -f setup.cfg && -d one_step_off ]] || die "$PWD is not a checkout of one_step_off; submit from its root"
[[ -x .venv-gpu/bin/ray && -x .venv-gpu/bin/python ]] ||
    die "$PWD/.venv-gpu is missing; create it with: EXTRA=gpu shell/setup.sh"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
count=${#nodes[@]}
# Slurm may say "8", "h100:8" or "8(S:0-1)".
gpus="${SLURM_GPUS_ON_NODE:-}"
gpus="${gpus%%(*}"
gpus="${gpus##*:}"
[[ "$gpus" =~ ^[1-9][0-9]*$ ]] ||
    die "Slurm gave this job no GPUs (SLURM_GPUS_ON_NODE=${SLURM_GPUS_ON_NODE:-}); use --gpus-per-node"
((count > 1 || gpus > 1)) || die "only one GPU in all; generation and training need one each"

repeat() { # repeat TEXT TIMES: "TEXT, TEXT, ..."
    local text="$1" i
    for ((i = 1; i < $2; i++)); do text+=", $1"; done
    echo "$text"
}
if ((count == 1)); then
    pools="{rollout: [$((gpus / 2))], actor: [$((gpus - gpus / 2))]}"
else
    pools="{rollout: [$(repeat "$gpus" $((count / 2)))], actor: [$(repeat "$gpus" $((count - count / 2)))]}"
fi
args=("config=${CONFIG:-config/qwen_gsm8k_fsdp.yaml}" "placement.pools=${POOLS:-$pools}")

head="${nodes[0]}"
read -r ip _ < <(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address)
export RAY_ADDRESS="$ip:${RAY_PORT:-6379}"
# A cluster for this job only. By default, Ray's head requires a token if its user has one, which the workers lack.
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"
export RAY_AUTH_TOKEN="${RAY_AUTH_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"

# A wrong config is reported here, before any cluster is started.
.venv-gpu/bin/python -m one_step_off.main_ppo "${args[@]}" "$@" --dry-run >/dev/null

run=
forward() { # forward SIGNAL: to the run; before there is one the job just ends
    [[ -n "$run" ]] || exit 1
    kill -s "$1" "$run" 2>/dev/null || true
}
trap 'forward USR1' USR1
trap 'forward TERM' TERM

started=()
stop() {
    if ((${#started[@]})); then kill "${started[@]}" 2>/dev/null || true; fi
    wait
}
trap stop EXIT

start_ray() { # start_ray NODE ARGUMENT...: in a job step that lives as long as Ray does there
    local node="$1"
    shift
    # A raylet hands its environment to the processes it starts; this address is for our program alone.
    env -u RAY_ADDRESS srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" --gpus-per-node="$gpus" \
        .venv-gpu/bin/ray start "$@" --num-gpus="$gpus" --disable-usage-stats --block &
    started+=($!)
}
echo "slurm_qwen_gsm8k: Ray on $count node(s) of $gpus GPU(s), head $head at $RAY_ADDRESS" || true
start_ray "$head" --head --node-ip-address="$ip" --port="${RAY_PORT:-6379}"
sleep 5
for node in "${nodes[@]:1}"; do
    start_ray "$node" --address="$RAY_ADDRESS"
done

wanted=$((count * gpus))
.venv-gpu/bin/python - "$wanted" "${RAY_WAIT_S:-180}" <<'PYTHON' || die "no cluster of $wanted GPUs: see above"
import os, socket, sys, time

wanted, wait_s = int(sys.argv[1]), float(sys.argv[2])
limit = time.monotonic() + wait_s
host, _, port = os.environ["RAY_ADDRESS"].rpartition(":")


def within_limit(what):
    if time.monotonic() > limit:
        sys.exit(f"{what} after {wait_s:g} s")
    time.sleep(2)


while True:  # ray.init would retry for minutes, without a way to stop it, while the head does not answer
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
        break
    except OSError as e:
        within_limit(f"the head does not answer at {host}:{port} ({e})")
import ray

ray.init(log_to_driver=False)
while (found := int(ray.cluster_resources().get("GPU", 0))) < wanted:
    within_limit(f"{found} of {wanted} GPUs")
PYTHON

# In the background: bash handles no signal while it waits for a program in the foreground.
.venv-gpu/bin/python -m one_step_off.main_ppo "${args[@]}" "$@" &
run=$!
code=0
wait "$run" || code=$?
while kill -0 "$run" 2>/dev/null; do # a signal has ended the wait, and not yet the run
    code=0
    wait "$run" || code=$?
done
exit "$code"
