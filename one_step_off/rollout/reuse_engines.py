"""Replicas that outlive an attempt: the next one takes them over, with their loaded engines.

Each drops what it holds of the attempt that has ended: requests, trajectories, episodes of external
agents. From then on it refuses prompts and weights of earlier attempts, and it generates
nothing before it has verified weights of the new one. A replica that does not do so in time is
replaced, while the others serve.
"""

import asyncio

from one_step_off.cluster.errors import PhaseTimeout, RoleError, SyncError
from one_step_off.cluster.remote_calls import name_failures, with_time_limit
from one_step_off.rollout.replica_group import RolloutGroup

DROP_S = 15.0
"""Seconds for a replica to drop its work. A sync whose trainers have died ends by itself meanwhile,
in about a second."""


async def reuse_engines(group: RolloutGroup, former: RolloutGroup, attempt: int) -> None:
    """Let the replicas of `former` serve in `group`, which has the same ones.

    Args:
        group: of the new attempt.
        former: of the attempt that has ended.
        attempt: of the new attempt.
    """
    group.router.replica_capacity = former.router.replica_capacity
    group.supervisor.restarts = former.restarts
    for i, processes in enumerate(former.supervisor.child_processes):
        group.supervisor.child_processes[i] = processes
    numbers = range(len(group.replicas))
    reasons = await asyncio.gather(*(_drop_work(former, i, attempt) for i in numbers))
    for i, reason in enumerate(reasons):
        if reason:
            group.supervisor.mark_failed(i, reason)
    group.has_answered = True
    kept = reasons.count("")
    group.events.log(f"{kept} of {len(reasons)} replicas were kept")


async def _drop_work(former: RolloutGroup, i: int, attempt: int) -> str:
    """Let a replica drop its work; returns why it cannot be kept, "" if it can."""
    if i in former.supervisor.restart_tasks:
        return "it was not running when the attempt ended"
    name = f"rollout {i}, drop_work"
    answer = former.replicas[i].drop_work.remote(attempt)
    try:
        await with_time_limit(DROP_S, name, name_failures(name, answer))
    except (RoleError, SyncError, PhaseTimeout) as error:
        return str(error)
    return ""
