"""Where a process can be hit: in which function of which module, in which process, and when.

No product code knows of this: `inject/sitecustomize.py` wraps these functions when their modules
are imported, in every process that has the folder `inject` on its PYTHONPATH. This module imports
the standard library only, for it runs in all of them.

The runner chooses what happens there: a signal to the process (SIGKILL, SIGSTOP), or one of
`ACTIONS` inside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Test = Callable[[tuple, dict], bool]

ACTIONS = ("raise", "hang", "corrupt")
"""An exception, a call that never returns, a wrong number in what is compared."""


@dataclass(frozen=True)
class Point:
    """One place where a process can be hit."""

    name: str
    """What the runner asks for."""
    kind: str
    """The process that is hit."""
    where: str
    """module:Class.method or module:function."""
    when: str = "before"
    """before, after, or idle (a moment after)."""
    only: Test | None = None
    """Of the arguments (self first): whether this call counts."""
    version: Callable[[tuple], int] | None = None
    """Of the arguments: the weight version that this process is busy with from here on. A fault may
    be meant for one version only."""
    corrupt: Callable[[tuple], None] | None = None
    """Of the arguments: makes the change of the action "corrupt"."""

    @property
    def hits_child(self) -> bool:
        """Whether the process that is hit is the child of the one that passes here: an engine, at a
        function of its replica."""
        return self.kind == "engine" and self.where.startswith(f"{ROLLOUT}:")


def _role(name: str) -> Test:
    return lambda args, kwargs: args[0].role == name


def _later_bucket(args: tuple, kwargs: dict) -> bool:
    return args[0].bucket_number >= 2


def _second_argument(args: tuple) -> int:
    return args[1]


def _version_of_stamp(args: tuple) -> int:
    _, version = args[1]
    return version


def _change_plan(args: tuple) -> None:
    args[0].plan.digest ^= 1


def _change_checksum(args: tuple) -> None:
    """As one changed bit of the first bucket would."""
    first, *_ = args[1].values()
    first[0, 0] ^= 1


def _change_log_probs(args: tuple) -> None:
    args[2][0] = args[2][0] + 9.0


FSDP = "one_step_off.training.fsdp.fsdp_workers"
TRAINED_WORKER = "one_step_off.training.trained_worker"
WORKER_CHECKPOINT = "one_step_off.training.worker_checkpoint"
ROLES = "one_step_off.training.roles"
WEIGHT_EXPORT = "one_step_off.training.weight_export"
ROLLOUT = "one_step_off.rollout.replica"
SENDER = "one_step_off.weight_sync.sender"
RECEIVER = "one_step_off.weight_sync.receiver"
TRAINER_SENDER = "one_step_off.weight_sync.trainer_sender"
VLLM_RECEIVER = "one_step_off.engines.vllm.worker_extension"
PIPELINE = "one_step_off.ray_trainer"
CHECKPOINT = "one_step_off.checkpoint.checkpointer"
SAMPLE_FILES = "one_step_off.checkpoint.files"
REPLICA_GROUP = "one_step_off.rollout.replica_group"
TRAINER_GROUP = "one_step_off.training.trainer_group"
COORDINATOR = "one_step_off.weight_sync.coordinator"

POINTS = [
    # The driver.
    Point("generating", "driver", "one_step_off.rollout.batch_sources:BatchSource.batch"),
    Point("training", "driver", f"{PIPELINE}:Pipeline._train"),
    Point("before the sync", "driver", f"{COORDINATOR}:WeightSync.__call__"),
    Point("in the sync", "driver", f"{COORDINATOR}:WeightSync._collect_metrics"),
    Point(
        "in the canary",
        "driver",
        f"{COORDINATOR}:WeightSync._check_canary",
        version=_version_of_stamp,
        corrupt=_change_log_probs,
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
    Point(
        "before the sync", "replica", f"{ROLLOUT}:RolloutReplica.sync", version=_version_of_stamp
    ),
    Point("after the sync", "replica", f"{ROLLOUT}:RolloutReplica.sync", "after"),
    Point("in the canary", "replica", f"{ROLLOUT}:RolloutReplica.score"),
    Point("starting", "replica", f"{ROLLOUT}:RolloutReplica.start"),
    Point("joining the sync", "replica", f"{ROLLOUT}:RolloutReplica.connect_sync"),
    # The replica's engine: vLLM's process.
    Point("generating", "engine", f"{ROLLOUT}:RolloutReplica._generate", "after"),
    Point("idle", "engine", f"{ROLLOUT}:RolloutReplica.rollout", "idle"),
    Point("in the canary", "engine", f"{ROLLOUT}:RolloutReplica.score"),
    Point(
        "in the header",
        "engine",
        f"{RECEIVER}:WeightReceiver._receive_headers",
        version=_second_argument,
        corrupt=_change_plan,
    ),
    Point(
        "before the first bucket",
        "engine",
        f"{RECEIVER}:WeightReceiver._receive_headers",
        "after",
        version=_second_argument,
    ),
    Point("between buckets", "engine", f"{RECEIVER}:WeightReceiver._free", "after"),
    Point("loading", "engine", "one_step_off.weight_sync.in_place_writer:InPlaceWriter.write"),
    Point(
        "after the last bucket",
        "engine",
        f"{RECEIVER}:WeightReceiver._verify_checksums",
        corrupt=_change_checksum,
    ),
    Point(
        "packing layers", "engine", f"{VLLM_RECEIVER}:OneStepOffTransferEngine.finish_weight_update"
    ),
    Point("joining the sync", "engine", f"{VLLM_RECEIVER}:SyncWorkerExtension.connect_sync"),
    # A rank of the actor.
    Point("forward", "trainer", f"{FSDP}:FsdpBackend._forward", only=_role("actor")),
    Point("optimizer", "trainer", f"{FSDP}:FsdpBackend._clip_and_step", only=_role("actor")),
    Point("idle", "trainer", f"{TRAINED_WORKER}:TrainedWorker.update", "idle", _role("actor")),
    Point("joining the sync", "trainer", f"{TRAINER_SENDER}:WeightSenderMixin.connect_sync"),
    Point(
        "before the first bucket",
        "trainer",
        f"{TRAINER_SENDER}:WeightSenderMixin.send_weights",
        version=_second_argument,
    ),
    Point("between buckets", "trainer", f"{SENDER}:WeightSender._pack", only=_later_bucket),
    Point(
        "after the last bucket",
        "trainer",
        f"{TRAINER_SENDER}:WeightSenderMixin.send_weights",
        "after",
    ),
    Point("in the canary", "trainer", f"{ROLES}:PolicyWorker.score"),
    Point(
        "checkpoint",
        "trainer",
        f"{WORKER_CHECKPOINT}:CheckpointedWorker.save_state",
        only=_role("actor"),
    ),
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
    Point("optimizer", "critic", f"{FSDP}:FsdpBackend._clip_and_step", only=_role("critic")),
    Point("idle", "critic", f"{TRAINED_WORKER}:TrainedWorker.update", "idle", _role("critic")),
    Point(
        "checkpoint",
        "critic",
        f"{WORKER_CHECKPOINT}:CheckpointedWorker.save_state",
        only=_role("critic"),
    ),
    # A reward worker.
    Point("scoring", "scorer", "one_step_off.rewards.scoring:Scorer.score_batch"),
    Point("idle", "scorer", "one_step_off.rewards.scoring:Scorer.score_batch", "idle"),
]
VERSION_POINTS = [
    Point(
        "",
        "engine",
        f"{VLLM_RECEIVER}:SyncWorkerExtension.sync_weights",
        version=_second_argument,
    )
]
"""Nothing happens there: the process notes its weight version."""
KINDS = tuple(dict.fromkeys(point.kind for point in POINTS))
RARE = ("starting", "resuming", "joining the sync")
"""Points that are passed only while another process comes back."""


def names_of(kind: str) -> list[str]:
    """The points that a process of this kind passes."""
    return [point.name for point in POINTS if point.kind == kind]
