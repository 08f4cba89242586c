"""Generation: one engine per replica, as a plain class that becomes a Ray actor.

A replica turns prompts into scored samples. Every token carries the version of the weights that
generated it: the engine receives that version after each verified sync, and generates nothing
before the first one.
"""

import asyncio
import functools
import gc
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
import psutil
import ray

from agent_loop.base import Generated, Loops
from agent_loop.tools import MCP_SCHEMAS
from one_step_off.cluster.errors import SyncError
from one_step_off.cluster.network import reachable_host
from one_step_off.cluster.placement import PlacedActor
from one_step_off.cluster.remote_calls import observed
from one_step_off.cluster.resource_usage import UsageProbe
from one_step_off.config.roles import load_section_tokenizer
from one_step_off.config.schema import Config
from one_step_off.data.images import Images
from one_step_off.data.packing import PackedSamples
from one_step_off.data.samples import PolicyVersion, Prompt, Sample, share_prompt_experts
from one_step_off.engines.engine import Engine, GenerationRequest, find_engine
from one_step_off.engines.engine_processes import ProcessId, kill_processes, not_running
from one_step_off.rollout.concurrency import ConcurrencyLimiter
from one_step_off.rollout.reward_queue import RewardQueue
from one_step_off.rollout.sampling import Sampling
from one_step_off.rollout.trajectory_run import TrajectoryRun, missing_rewards

T = TypeVar("T")

POLL_S = 0.02


def _part_of_sync(method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Hold `sync_lock` during a method of a replica, so that others know when it has ended."""

    @functools.wraps(method)
    async def call(self: "RolloutReplica", *args: Any) -> T:
        async with self.sync_lock:
            return await method(self, *args)

    return call


class RolloutReplica(UsageProbe, PlacedActor):
    """One engine (tensor_parallel_size GPUs) and everything that talks to it."""

    # Ray's own limit, 1000 calls at once, is less than the prompts that may be in scoring at a
    # time.
    calls_at_once = 1 << 14
    threads = {"control": 1}  # an event loop of its own for `alive`

    def __init__(
        self,
        cfg: Config,
        index: int,
        device: str,
        scorers: list[Any],
        mcp_schemas: Any = (),
        loops: Sequence[str] = ("",),
        seed: int = 0,
        endpoint: Any = None,
        log: str = "",
    ) -> None:
        """
        Args:
            index: of this replica among all.
            device: "cpu" or "cuda".
            scorers: the reward workers.
            mcp_schemas: the driver's `agent_loop.tools.MCP_SCHEMAS`.
            loops: the names of the agent loops that the data uses.
            seed: of the engine, see `sampling.engine_seed`.
            endpoint: an `EndpointAccess`, where external agents find the run; None: it has no
                endpoint.
            log: the file with the output of this process; "": it has none of its own.
        """
        self.cfg = cfg
        self.index = index
        self.loop_names = loops
        MCP_SCHEMAS.update(mcp_schemas)
        self.rewards = RewardQueue(scorers, index)
        self.stamp: PolicyVersion | None = None  # of the verified weights
        self.attempt = 0
        self.engine: Engine = find_engine(cfg.rollout.engine)(cfg, device, seed, log)
        self.limiter = ConcurrencyLimiter(cfg.agent.max_concurrency, self.engine)
        self.endpoint_access = endpoint
        self.endpoint: Any = None  # a `ReplicaServer`
        self.sync_lock = asyncio.Lock()  # held by each part of a sync, so that its end is known
        self.work: set[asyncio.Task] = set()  # of the current attempt; see `drop_work`

    async def start(self, former: Sequence[ProcessId] = ()) -> tuple[int, list[ProcessId]]:
        """Load the engine.

        Args:
            former: the processes of the replica that this one replaces. An engine may outlive its
                replica, and would keep its memory.

        Returns:
            How many sequences the engine works on at once, and the processes below this one.

        Raises:
            ProcessDied: a process of the engine was killed.
            RuntimeError: the engine did not start; the message names the reason.
        """
        kill_processes(former)
        self.tokenizer = load_section_tokenizer(self.cfg, "model")
        if self.endpoint_access is not None:
            self.endpoint = self._create_endpoint()
        for name in self.loop_names:  # now, because all trajectories would wait for them later
            self.loops.get(name)
        await self.engine.start()
        if self.endpoint is not None:
            await self._start_endpoint(self.endpoint)
        # Modules and engine stay: looking through them in every collection would stop all
        # trajectories meanwhile.
        gc.collect()
        gc.freeze()
        children = psutil.Process().children(recursive=True)
        child_ids = [(child.pid, child.create_time()) for child in children]
        return self.engine.max_sequences, child_ids

    def _create_endpoint(self) -> Any:
        # An HTTP server is slow to import, and most runs need none.
        from one_step_off.endpoint.http_server import limits_for
        from one_step_off.endpoint.replica_server import ReplicaServer

        data = self.cfg.data
        max_sequence = data.max_prompt_length + data.max_response_length
        limits = limits_for(self.cfg.agent.max_concurrency)
        return ReplicaServer(self.index, self.endpoint_access, max_sequence, limits)

    async def _start_endpoint(self, endpoint: Any) -> None:
        """Serve external agents from now on."""
        engine: Any = self.engine  # `prepare` has refused engines that are no `ServesAgents`
        endpoint.serving = engine.agent_serving(self.tokenizer)
        gateway = self.endpoint_access.gateway
        await endpoint.start(
            reachable_host(self.endpoint_access.host),
            lambda *report: gateway.register.remote(*report),
        )

    async def start_note(self) -> str:
        """What the engine says of itself for the console; "": nothing."""
        return getattr(self.engine, "start_note", "")

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker, see `Engine.call_workers`."""
        return await self.engine.call_workers(method, *args)

    async def kv_cache_bytes(self) -> int:
        """The size of the smallest KV cache of its workers."""
        return min(await self.call_workers("kv_cache_bytes"))

    @_part_of_sync
    async def learn_shards(self, shapes: dict[str, Any]) -> list[dict[str, Any]]:
        """Which blocks of the tensors each worker keeps, or that it wants whole tensors.

        Args:
            shapes: name -> [dtype, shape].
        """
        expects_deltas = self.cfg.weight_sync.mode == "delta"
        return await self.call_workers("learn_shards", shapes, expects_deltas)

    @_part_of_sync
    async def prove_base(
        self, shapes: dict[str, Any], blocks: list[list[Any]]
    ) -> list[dict[str, Any]]:
        """Compare the base model that each worker has loaded with the trainer's
        (weight_sync.lora=adapter).

        Args:
            shapes: of the adapter's matrices: name -> [dtype, shape].
            blocks: of `BaseModel`.

        Raises:
            SyncError: it is another one, or the engine cannot hold these matrices.
        """
        return await self.call_workers("prove_base", shapes, blocks)

    @_part_of_sync
    async def connect_sync(self, info: dict[str, Any], first_receiver: int) -> None:
        """Join the weight-sync groups of a new epoch.

        Args:
            info: what the workers' `connect_sync` takes and all replicas share.
            first_receiver: the number of this replica's first worker.

        Raises:
            SyncError: a worker could not join.
        """
        replica_info = {"host": reachable_host(info["host"]), "first_receiver": first_receiver}
        await self.call_workers("connect_sync", info | replica_info)

    @_part_of_sync
    async def sync(self, stamp: PolicyVersion, sharded_only: bool = False) -> list[dict[str, Any]]:
        """Receive the weights `stamp`: pause, stream, verify, resume; the caches are cleared
        unless `weight_sync.in_flight` is keep.

        By `weight_sync.in_flight` there are no unfinished requests, or they resume then. Their KV
        cache is computed again or kept.

        Args:
            stamp: (attempt, version).
            sharded_only: each worker gets what it keeps, in place of whole tensors.

        Returns:
            Per worker the seconds per phase (pause, wait, load, verify, ...), bytes, what
            `WeightReceiver.receive` reports besides, and as "pressure" what the limiter has seen
            of the engine since the last sync.

        Raises:
            SyncError: the engine stays paused, and generates nothing until another sync has
                succeeded. Or the weights are those of an attempt that has ended.
        """
        attempt, version = stamp
        if attempt < self.attempt:
            raise SyncError(
                f"rollout replica {self.index} belongs to attempt {self.attempt}, and gets "
                f"weights of attempt {attempt}, which has ended"
            )
        self.stamp = None
        self.attempt = attempt
        begin = time.perf_counter()
        in_flight = self.cfg.weight_sync.in_flight
        await self.engine.pause(wait=in_flight == "wait", clear_cache=in_flight != "keep")
        pause_s = time.perf_counter() - begin
        await self.engine.wake_up(["weights"])
        reports = await self.call_workers("sync_weights", version, sharded_only)
        await self.engine.wake_up(["kv_cache"])
        await self.engine.resume(stamp)
        self.stamp = stamp
        paused_s = time.perf_counter() - begin
        common = {"pause": pause_s, "paused": paused_s, "pressure": self.limiter.report()}
        return [report | common for report in reports]

    async def ping(self) -> tuple[int, int]:
        """Answer once the engine has, between two of its steps.

        Returns:
            How many requests the engine has finished, and how many it works on.

        Raises:
            RuntimeError: the engine died.
        """
        self._raise_if_engine_died()
        await self.engine.heartbeat()
        finished = self.engine.finished_requests
        return finished, self.engine.started_requests - finished

    @ray.method(concurrency_group="control")
    async def alive(self) -> None:
        """Answer, however busy this process and its engine are.

        Raises:
            RuntimeError: the engine died, or is stopped.
        """
        self._raise_if_engine_died()
        for process in self.engine.processes():
            state = not_running(process)
            if state:
                raise RuntimeError(
                    f"the engine of rollout replica {self.index}, process {process.pid}, is {state}"
                )

    def _raise_if_engine_died(self) -> None:
        if self.engine.errored:
            raise RuntimeError(f"the engine of rollout replica {self.index} died")

    def bound_pids(self) -> list[int]:
        """See `PlacedActor`: the engine's processes too."""
        return [os.getpid(), *(process.pid for process in self.engine.processes())]

    async def sleep(self) -> None:
        """Give the memory to another role; the next sync brings weights. A CPU engine keeps its
        memory and idles."""
        self.stamp = None
        await self.engine.sleep()

    async def rollout(self, prompts: list[Prompt], sampling: Sampling) -> list[Sample]:
        """All trajectories of these prompts, scored, in order. An episode of an external agent may
        give several samples, one after another.

        Raises:
            RuntimeError: the replica has no verified weights, or the engine died.
        """
        if self.stamp is None:
            raise RuntimeError(f"rollout replica {self.index} has no verified weights")
        return await self._until_dropped(self._trajectories(prompts, sampling))

    async def _trajectories(self, prompts: list[Prompt], sampling: Sampling) -> list[Sample]:
        places = [(prompt, index) for prompt in prompts for index in range(sampling.size)]
        tasks = [
            asyncio.create_task(self._trajectory(prompt, index, sampling))
            for prompt, index in places
        ]
        try:
            trajectories = await asyncio.gather(*tasks)
            of_prompts = [prompt for prompt, _ in places]
            for position, error in missing_rewards(of_prompts, trajectories).items():
                failed = TrajectoryRun(self, *places[position], sampling)
                trajectories[position] = [failed.failed_sample(error)]
            samples = PackedSamples(sample for samples in trajectories for sample in samples)
            share_prompt_experts(samples)
            return samples
        finally:
            for task in tasks:
                task.cancel()

    async def _trajectory(self, prompt: Prompt, index: int, sampling: Sampling) -> list[Sample]:
        return await TrajectoryRun(self, prompt, index, sampling).samples()

    async def wait_for_capacity(self, sent: int, most: int) -> tuple[int, int]:
        """Wait until the replica has room for another trajectory.

        Args:
            sent: trajectories that the caller has sent since the start. The caller counts them,
                because its calls may arrive in another order.
            most: trajectories that may ask for the engine at once. The engine's KV cache may have
                room for fewer.

        Returns:
            How many trajectories ask nothing of the engine, and how many may ask for it at once.
        """
        return await self._until_dropped(self.limiter.wait_for_capacity(sent, most))

    async def _until_dropped(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a part of the current attempt's work. Raises RuntimeError: the attempt has
        ended."""
        task = observed(work)
        self.work.add(task)
        try:
            await asyncio.wait([task])
            if task.cancelled():
                raise RuntimeError(f"rollout replica {self.index}: the attempt has ended")
            return task.result()
        finally:
            task.cancel()
            self.work.discard(task)

    async def drop_work(self, attempt: int) -> None:
        """Trainers have died, and the next attempt takes this replica over: drop everything that
        belongs to the one before. Returns when the engine has no request left.

        Nothing is generated before verified weights of the new attempt have come.

        Args:
            attempt: of the new attempt. Weights of earlier ones are refused from now on.

        Raises:
            RuntimeError: the engine died.
        """
        self.stamp = None
        self.attempt = attempt
        self._raise_if_engine_died()
        self.rewards.drop_waiting()
        # Before the requests end: that they are cancelled says nothing about the cache.
        limiter = self.limiter.successor()
        for task in self.work:
            task.cancel()
        if self.endpoint is not None:
            self.endpoint.close_all("attempt")
        async with self.sync_lock:  # the senders are gone, which ends a sync
            self.stamp = None  # a sync that was almost over may have set it
            while self.work or self.engine.has_unfinished_requests():
                await asyncio.sleep(POLL_S)
        self.limiter = limiter  # the caller counts from zero again
        self._raise_if_engine_died()

    async def hand_device_back(self, attempt: int | None = None) -> None:
        """The trainer needs the device: drop all work as in `drop_work`, and sleep. `attempt`: the
        new one; None: the same. Raises RuntimeError: the engine died."""
        await self.drop_work(self.attempt if attempt is None else attempt)
        await self.sleep()

    @functools.cached_property
    def loops(self) -> Loops:
        """The agent loops, by name."""
        return Loops(self.cfg, self.tokenizer, self.endpoint)

    async def _generate(
        self,
        ids: np.ndarray,
        max_tokens: int,
        seed: int | None,
        sampling: Sampling,
        images: Images = (),
    ) -> Generated:
        """One request to the engine: the tokens that follow `ids`, int32 [T], which begin with the
        prompt of `images`."""
        request = GenerationRequest(
            ids, max_tokens, sampling.temperature, sampling.top_p, seed, sampling.stop, images
        )
        return await self.engine.generate(request)

    async def score(
        self, sequences: list[np.ndarray], images: Sequence[Images] = ()
    ) -> list[np.ndarray]:
        """The engine's half of the canary: log-probs (nats, temperature 1) of every token but the
        first.

        Args:
            sequences: token ids, int32 [T] each.
            images: of each sequence; (): none has any.

        Returns:
            float32 [T - 1] per sequence.
        """

        async def score_all() -> list[np.ndarray]:
            columns = (sequences, images) if images else (sequences,)
            scored = zip(*columns, strict=True)
            return await asyncio.gather(*(self.engine.score(*own) for own in scored))

        return await self._until_dropped(score_all())

    async def stop(self) -> None:
        """Close the endpoint, and end the engine's processes."""
        if self.endpoint is not None:
            await self.endpoint.stop()
        self.engine.shutdown()
