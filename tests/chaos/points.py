"""Where a process can be hit: which function of which module, in which process, and when in it.

No product code knows of this: `inject/sitecustomize.py` wraps these functions, when their module is imported, in every
process that has the folder `inject` on its PYTHONPATH. Only the standard library here, for it runs in all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Test = Callable[[tuple, dict], bool]


@dataclass(frozen=True)
class Point:
    """`name`: what the runner asks for. `kind`: the process that dies there; "engine" at a replica's function means its
    child. `where`: "module:Class.method" or "module:function". `when`: before, after, or idle (a moment after). `only`:
    of the arguments (self first), whether this call counts."""

    name: str
    kind: str
    where: str
    when: str = "before"
    only: Test | None = None


def _role(name: str) -> Test:
    return lambda args, kwargs: args[0].role == name


def _later_bucket(args: tuple, kwargs: dict) -> bool:
    return args[0].bucket >= 1


FSDP, SYNC, ROLLOUT = "one_step_off.fsdp_workers", "one_step_off.distributed_util", "one_step_off.vllm_rollout"
SENDING, RECEIVER, PIPELINE = "one_step_off.sending_end", "one_step_off.vllm_receiver", "one_step_off.ray_trainer"
CHECKPOINT, GROUPS, WEIGHTS = "one_step_off.checkpoint", "one_step_off.groups", "one_step_off.weight_sync"

POINTS = [
    # The driver.
    Point("generating", "driver", f"{PIPELINE}:Pipeline._collect"),
    Point("training", "driver", f"{PIPELINE}:Pipeline._train"),
    Point("before the sync", "driver", f"{WEIGHTS}:WeightSync.__call__"),
    Point("in the sync", "driver", f"{WEIGHTS}:WeightSync._metrics"),
    Point("in the canary", "driver", f"{WEIGHTS}:WeightSync._check_canary"),
    Point("checkpoint: begins", "driver", f"{CHECKPOINT}:Checkpointer.save"),
    Point("checkpoint: samples", "driver", f"{CHECKPOINT}:write_samples"),
    Point("checkpoint: before its seal", "driver", f"{CHECKPOINT}:Checkpointer._commit"),
    Point("checkpoint: onto the disk", "driver", f"{CHECKPOINT}:_sync"),
    Point("checkpoint: has its name", "driver", f"{CHECKPOINT}:Checkpointer._commit", "after"),
    Point("between two files", "driver", "one_step_off.tracking:Tracker._append", "after"),
    Point("starting", "driver", "one_step_off.roles:Spawned.setup"),
    Point("resuming", "driver", "one_step_off.roles:Spawned.load_state"),
    # A replica: the Ray actor.
    Point("generating", "replica", f"{ROLLOUT}:RolloutReplica._generate"),
    Point("idle", "replica", f"{ROLLOUT}:RolloutReplica.rollout", "idle"),
    Point("before the sync", "replica", f"{ROLLOUT}:RolloutReplica.sync"),
    Point("after the sync", "replica", f"{ROLLOUT}:RolloutReplica.sync", "after"),
    Point("in the canary", "replica", f"{ROLLOUT}:RolloutReplica.score"),
    Point("starting", "replica", f"{ROLLOUT}:RolloutReplica.start"),
    Point("joining the sync", "replica", f"{ROLLOUT}:RolloutReplica.connect_sync"),
    # Its engine: vLLM's process.
    Point("generating", "engine", f"{ROLLOUT}:RolloutReplica._generate", "after"),
    Point("idle", "engine", f"{ROLLOUT}:RolloutReplica.rollout", "idle"),
    Point("in the canary", "engine", f"{ROLLOUT}:RolloutReplica.score"),
    Point("before the first bucket", "engine", f"{SYNC}:Receiver._headers", "after"),
    Point("between buckets", "engine", "one_step_off.bucket_plan:Bucket.join", "after"),
    Point("after the last bucket", "engine", f"{SYNC}:Receiver._check_sums"),
    Point("packing layers", "engine", f"{RECEIVER}:OneStepOffTransferEngine.finish_weight_update"),
    Point("joining the sync", "engine", f"{RECEIVER}:SyncWorkerExtension.connect_sync"),
    # A rank of the actor.
    Point("forward", "trainer", f"{FSDP}:ModelWorker._forward", only=_role("actor")),
    Point("optimiser", "trainer", f"{FSDP}:TrainedWorker._clip_and_step", only=_role("actor")),
    Point("idle", "trainer", f"{FSDP}:TrainedWorker.update", "idle", _role("actor")),
    Point("before the first bucket", "trainer", f"{SENDING}:SendingEnd.send_weights"),
    Point("between buckets", "trainer", f"{SYNC}:Sender._pack", only=_later_bucket),
    Point("after the last bucket", "trainer", f"{SENDING}:SendingEnd.send_weights", "after"),
    Point("in the canary", "trainer", f"{FSDP}:PolicyWorker.score"),
    Point("checkpoint", "trainer", f"{FSDP}:TrainedWorker._write_state", only=_role("actor")),
    Point("checkpoint: being written", "trainer", f"{FSDP}:TrainedWorker.saved", only=_role("actor")),
    Point("starting", "trainer", f"{FSDP}:PolicyWorker.setup", only=_role("actor")),
    Point("resuming", "trainer", f"{FSDP}:TrainedWorker.load_state", only=_role("actor")),
    # A rank of the critic.
    Point("forward", "critic", f"{FSDP}:ModelWorker._forward", only=_role("critic")),
    Point("optimiser", "critic", f"{FSDP}:TrainedWorker._clip_and_step", only=_role("critic")),
    Point("idle", "critic", f"{FSDP}:TrainedWorker.update", "idle", _role("critic")),
    Point("checkpoint", "critic", f"{FSDP}:TrainedWorker._write_state", only=_role("critic")),
    # A reward worker.
    Point("scoring", "scorer", "one_step_off.rewards:Scorer.score_batch"),
    Point("idle", "scorer", "one_step_off.rewards:Scorer.score_batch", "idle"),
]
KINDS = tuple(dict.fromkeys(p.kind for p in POINTS))
RARE = ("starting", "resuming", "joining the sync")  # only while something else comes back
