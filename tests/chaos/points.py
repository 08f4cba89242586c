"""Where a process can be hit: which function of which module, in which process, and when in it.

No product code knows of this: `inject/sitecustomize.py` wraps these functions, when their module is imported, in every
process that has the folder `inject` on its PYTHONPATH. Only the standard library here, for it runs in all of them.

What happens there is the runner's choice: a signal to the process (SIGKILL, SIGSTOP), or one of `ACTIONS` inside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Test = Callable[[tuple, dict], bool]

ACTIONS = (
    "raise",
    "hang",
    "corrupt",
)  # an exception, a call that never returns, a wrong number in what is compared


@dataclass(frozen=True)
class Point:
    """`name`: what the runner asks for. `kind`: the process that dies there; "engine" at a replica's function means its
    child. `where`: "module:Class.method" or "module:function". `when`: before, after, or idle (a moment after). `only`:
    of the arguments (self first), whether this call counts. `version`: of the arguments, the weight version that this
    process is busy with from here on; a fault may be meant for one version only. `corrupt`: of the arguments, what the
    action of that name changes."""

    name: str
    kind: str
    where: str
    when: str = "before"
    only: Test | None = None
    version: Callable[[tuple], int] | None = None
    corrupt: Callable[[tuple], None] | None = None


def _role(name: str) -> Test:
    return lambda args, kwargs: args[0].role == name


def _later_bucket(args: tuple, kwargs: dict) -> bool:
    return args[0].bucket_number >= 2


def _second(args: tuple) -> int:
    return args[1]


def _stamped(args: tuple) -> int:
    return args[1][1]


def _other_plan(args: tuple) -> None:
    args[0].plan.digest ^= 1


def _other_sum(args: tuple) -> None:
    args[1][0, 0, 0] ^= 1  # as if one bit of the first bucket had changed on the way


def _other_log_probs(args: tuple) -> None:
    args[2][0] = args[2][0] + 9.0


FSDP = "one_step_off.training.fsdp_workers"
TRAINED_WORKER = "one_step_off.training.trained_worker"
WORKER_CHECKPOINT = "one_step_off.training.worker_checkpoint"
POLICY_ROLE = "one_step_off.training.policy_role"
WEIGHT_EXPORT = "one_step_off.training.weight_export"
ROLLOUT = "one_step_off.rollout.vllm_replica"
SENDER = "one_step_off.weight_sync.sender"
RECEIVER = "one_step_off.weight_sync.receiver"
TRAINER_SENDER = "one_step_off.weight_sync.trainer_sender"
VLLM_RECEIVER = "one_step_off.weight_sync.vllm_receiver"
PIPELINE = "one_step_off.ray_trainer"
CHECKPOINT = "one_step_off.checkpoint.checkpointer"
SAMPLE_FILES = "one_step_off.checkpoint.sample_files"
REPLICA_GROUP = "one_step_off.rollout.replica_group"
TRAINER_GROUP = "one_step_off.training.trainer_group"
COORDINATOR = "one_step_off.weight_sync.coordinator"

POINTS = [
    # The driver.
    Point("generating", "driver", f"{PIPELINE}:Pipeline._collect"),
    Point("training", "driver", f"{PIPELINE}:Pipeline._train"),
    Point("before the sync", "driver", f"{COORDINATOR}:WeightSync.__call__"),
    Point("in the sync", "driver", f"{COORDINATOR}:WeightSync._collect_metrics"),
    Point(
        "in the canary",
        "driver",
        f"{COORDINATOR}:WeightSync._check_canary",
        version=_stamped,
        corrupt=_other_log_probs,
    ),
    Point("checkpoint: begins", "driver", f"{CHECKPOINT}:Checkpointer.save"),
    Point("checkpoint: samples", "driver", f"{SAMPLE_FILES}:write_samples"),
    Point("checkpoint: before its seal", "driver", f"{CHECKPOINT}:Checkpointer._commit"),
    Point("checkpoint: onto the disk", "driver", f"{CHECKPOINT}:_flush_to_disk"),
    Point("checkpoint: has its name", "driver", f"{CHECKPOINT}:Checkpointer._commit", "after"),
    Point(
        "between two files", "driver", "one_step_off.monitoring.tracker:Tracker._append", "after"
    ),
    Point("starting", "driver", "one_step_off.runtime.processes:RunProcesses.setup"),
    Point("resuming", "driver", "one_step_off.runtime.processes:RunProcesses.load_state"),
    # A replica: the Ray actor.
    Point("generating", "replica", f"{ROLLOUT}:RolloutReplica._generate"),
    Point("idle", "replica", f"{ROLLOUT}:RolloutReplica.rollout", "idle"),
    Point("before the sync", "replica", f"{ROLLOUT}:RolloutReplica.sync", version=_stamped),
    Point("after the sync", "replica", f"{ROLLOUT}:RolloutReplica.sync", "after"),
    Point("in the canary", "replica", f"{ROLLOUT}:RolloutReplica.score"),
    Point("starting", "replica", f"{ROLLOUT}:RolloutReplica.start"),
    Point("joining the sync", "replica", f"{ROLLOUT}:RolloutReplica.connect_sync"),
    # Its engine: vLLM's process.
    Point("generating", "engine", f"{ROLLOUT}:RolloutReplica._generate", "after"),
    Point("idle", "engine", f"{ROLLOUT}:RolloutReplica.rollout", "idle"),
    Point("in the canary", "engine", f"{ROLLOUT}:RolloutReplica.score"),
    Point(
        "in the header",
        "engine",
        f"{RECEIVER}:WeightReceiver._receive_headers",
        version=_second,
        corrupt=_other_plan,
    ),
    Point(
        "before the first bucket",
        "engine",
        f"{RECEIVER}:WeightReceiver._receive_headers",
        "after",
        version=_second,
    ),
    Point("between buckets", "engine", "one_step_off.weight_sync.bucket_plan:Bucket.join", "after"),
    Point("loading", "engine", f"{VLLM_RECEIVER}:OneStepOffTransferEngine._load"),
    Point(
        "after the last bucket",
        "engine",
        f"{RECEIVER}:WeightReceiver._verify_checksums",
        corrupt=_other_sum,
    ),
    Point(
        "packing layers", "engine", f"{VLLM_RECEIVER}:OneStepOffTransferEngine.finish_weight_update"
    ),
    Point("joining the sync", "engine", f"{VLLM_RECEIVER}:SyncWorkerExtension.connect_sync"),
    # A rank of the actor.
    Point("forward", "trainer", f"{FSDP}:FsdpBackend._forward", only=_role("actor")),
    Point("optimiser", "trainer", f"{FSDP}:FsdpBackend._clip_and_step", only=_role("actor")),
    Point("idle", "trainer", f"{TRAINED_WORKER}:TrainedWorker.update", "idle", _role("actor")),
    Point("joining the sync", "trainer", f"{TRAINER_SENDER}:WeightSenderMixin.connect_sync"),
    Point(
        "before the first bucket",
        "trainer",
        f"{TRAINER_SENDER}:WeightSenderMixin.send_weights",
        version=_second,
    ),
    Point("between buckets", "trainer", f"{SENDER}:WeightSender._pack", only=_later_bucket),
    Point(
        "after the last bucket",
        "trainer",
        f"{TRAINER_SENDER}:WeightSenderMixin.send_weights",
        "after",
    ),
    Point("in the canary", "trainer", f"{POLICY_ROLE}:PolicyRole.score"),
    Point("checkpoint", "trainer", f"{FSDP}:FsdpBackend._write_state", only=_role("actor")),
    Point(
        "checkpoint: being written",
        "trainer",
        f"{WORKER_CHECKPOINT}:CheckpointedWorker.saved",
        only=_role("actor"),
    ),
    Point("starting", "trainer", f"{WEIGHT_EXPORT}:WeightExport.setup", only=_role("actor")),
    Point(
        "resuming",
        "trainer",
        f"{WORKER_CHECKPOINT}:CheckpointedWorker.load_state",
        only=_role("actor"),
    ),
    # A rank of the critic.
    Point("forward", "critic", f"{FSDP}:FsdpBackend._forward", only=_role("critic")),
    Point("optimiser", "critic", f"{FSDP}:FsdpBackend._clip_and_step", only=_role("critic")),
    Point("idle", "critic", f"{TRAINED_WORKER}:TrainedWorker.update", "idle", _role("critic")),
    Point("checkpoint", "critic", f"{FSDP}:FsdpBackend._write_state", only=_role("critic")),
    # A reward worker.
    Point("scoring", "scorer", "one_step_off.rewards.scoring:Scorer.score_batch"),
    Point("idle", "scorer", "one_step_off.rewards.scoring:Scorer.score_batch", "idle"),
]
# Nothing happens there; the process notes its weight version.
NOTES = [Point("", "engine", f"{VLLM_RECEIVER}:SyncWorkerExtension.sync_weights", version=_second)]
KINDS = tuple(dict.fromkeys(p.kind for p in POINTS))
RARE = ("starting", "resuming", "joining the sync")  # only while something else comes back
