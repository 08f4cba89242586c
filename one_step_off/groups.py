"""The groups of processes as the pipeline sees them: a few awaitable methods, each with a time limit.

`TrainGroup` is a role with a model on one or more ranks, `RolloutGroup` the vLLM replicas, and `WeightSync`
the bridge between the two. The pipeline is tested with stand-ins that have the same methods.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

import numpy as np

from one_step_off.advantages import ADVANTAGE_ESTIMATORS
from one_step_off.config import Config, ConfigError
from one_step_off.distributed_util import BucketPlan, SyncError
from one_step_off.samples import Batch, Prompt, Sample, StalenessError, Stamp
from one_step_off.vllm_rollout import Sampling

T = TypeVar("T")
OnSpan = Callable[[str, str, int, float, float], None]
"""Told of a role's work: (role, method, step, begin, end), in seconds of time.perf_counter."""

SLOWEST_LINK = 50e6  # bytes/s: a sync slower than this counts as stuck


class PhaseTimeout(RuntimeError):
    """A phase took longer than its limit."""


class RoleError(RuntimeError):
    """A process of a role failed; says which, in what, and why."""


async def within(limit_s: float, what: str, work: Awaitable[T]) -> T:
    """Await `work`; raises PhaseTimeout naming `what` after `limit_s` seconds."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await work
    except TimeoutError as e:
        if not limit.expired():  # a time limit of the work's own
            raise
        raise PhaseTimeout(f"{what}: no answer in {limit_s:g} s") from e


async def named(who: str, work: Awaitable[T]) -> T:
    """Await one process's answer; its failure is raised with `who` in front. ConfigError, StalenessError and SyncError
    keep their kind; anything else, its death included, is a RoleError."""
    try:
        return await work
    except Exception as e:
        # Ray wraps what a process raised, and puts that process's whole traceback into the message.
        cause = getattr(e, "cause", None) or e
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [""]
        if isinstance(cause, ConfigError):
            raise ConfigError(str(cause)) from e
        if isinstance(cause, (StalenessError, SyncError)):
            raise type(cause)(f"{who}: {cause}") from e
        if type(e).__name__ in ("ActorDiedError", "ActorUnavailableError"):
            pid = next((line.split()[-1] for line in lines if line.startswith("pid:")), "unknown")
            raise RoleError(f"{who}: its process died (pid {pid})") from e
        raise RoleError(f"{who}: {type(cause).__name__}: {lines[0]}") from e


async def every(limit_s: float, what: str, actors: list[Any], method: str, *args: Any) -> list[Any]:
    """Call a method on all actors at once and await all; the first failure is raised at once, and names the actor."""
    calls = (named(f"{what} {i}, {method}", getattr(a, method).remote(*args)) for i, a in enumerate(actors))
    return await within(limit_s, f"{what}, {method}", asyncio.gather(*calls))


class TrainGroup:
    """All ranks of one role. Their methods are collective: every call goes to every rank. Roles in one pool share
    `turn`, so that they take turns on its devices; in different pools they run at once."""

    def __init__(self, role: str, ranks: list[Any], cfg: Config, turn: Any = None, host: str = "") -> None:
        """`host`: the address at which the ranks meet; empty: rank 0's address on the network."""
        self.role, self.ranks, self.cfg, self.host = role, ranks, cfg, host
        self.turn = turn or asyncio.Lock()
        self.limit = cfg.trainer.step_timeout_s
        self.colocated: RolloutGroup | None = None  # the replicas in the same pool
        self.on_span: OnSpan = lambda *_: None

    async def setup(self) -> None:
        """Form the role's process group and load the model on every rank."""
        limit = self.cfg.trainer.start_timeout_s
        (address,) = await every(limit, self.role, self.ranks[:1], "free_address", self.host)
        await every(limit, self.role, self.ranks, "setup", *address)

    async def _in_turn(self, step: int, method: str, *args: Any) -> list[Any]:
        """Every rank's answer, once it is this role's turn; when it began and ended is told to `on_span`."""
        async with self.turn:
            if self.colocated is not None:
                await self.colocated.sleep()
            begin = time.perf_counter()
            answers = await every(self.limit, f"step {step}, {self.role}", self.ranks, method, *args)
            self.on_span(self.role, method, step, begin, time.perf_counter())
        return answers

    async def update(self, batch: Batch, learn: bool = True) -> dict[str, float]:
        """One training step on all ranks; returns its metrics. Without `learn` it counts and nothing changes."""
        return (await self._in_turn(batch.step, "update", _put(batch), learn))[0]

    async def log_prob(self, batch: Batch) -> list[np.ndarray]:
        """Log-probs (nats) of all response tokens at the current weights: one float32 [R] per sample."""
        return merged(await self._in_turn(batch.step, "log_prob", _put(batch)))

    async def log_prob_and_squares(self, batch: Batch) -> list[np.ndarray]:
        """As `log_prob`, float32 [R, 2]: beside each log-prob the sum of all the vocabulary's squared probabilities."""
        return merged(await self._in_turn(batch.step, "log_prob_and_squares", _put(batch)))

    async def values(self, batch: Batch) -> list[np.ndarray]:
        """The critic's values of the states before all response tokens: one float32 [R] per sample."""
        return merged(await self._in_turn(batch.step, "values", _put(batch)))

    async def score(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        """The trainer's half of the canary: log-probs of every token but the first, at temperature 1."""
        return next(filter(None, await every(self.limit, f"canary, {self.role}", self.ranks, "score", sequences)))

    async def save_state(self, folder: str) -> None:
        """Write the role's part of a checkpoint."""
        await every(self.limit, f"checkpoint, {self.role}", self.ranks, "save_state", folder)

    async def load_state(self, folder: str) -> None:
        """Go to a checkpoint's state; after `setup`."""
        await every(self.limit, f"checkpoint, {self.role}", self.ranks, "load_state", folder)

    async def save_hf(self, path: str) -> None:
        """Write a Hugging Face checkpoint."""
        await every(self.limit, self.role, self.ranks, "save_hf", path)


def merged(parts: list[dict[int, T]]) -> list[T]:
    """The ranks' shares, put back in order."""
    merged = {i: answer for part in parts for i, answer in part.items()}
    return [merged[i] for i in range(len(merged))]


def _put(batch: Batch) -> Any:
    """Into Ray's object store once, however many ranks read it."""
    import ray

    return ray.put(batch)


@dataclass
class Load:
    """Trajectories of a replica: `sent` to it, come `back`, and that asked nothing of its engine when it said so last (`away`)."""

    sent: int = 0
    back: int = 0
    away: int = 0

    @property
    def now(self) -> int:
        """Those that generate or are to, as far as is known."""
        return self.sent - max(self.back, self.away)


class RolloutGroup:
    """The vLLM replicas. A prompt's trajectories stay on one of them: its cache knows the prompt and the turns so far.

    Prompts go to them in turn, so that a run's routing depends on nothing but its data; or each to the one on which the
    fewest trajectories generate (`rollout.routing`). Then a replica is sent no more than keep its engine full: the other
    prompts wait for whichever is done first.
    """

    def __init__(self, replicas: list[Any], cfg: Config, seeded: bool, turn: Any = None) -> None:
        """`turn`: shared with the other roles in the pool, if there are any."""
        self.replicas, self.cfg = replicas, cfg
        self.turn = turn or nullcontext()
        self.static = cfg.rollout.routing == "static" or (cfg.rollout.routing == "auto" and seeded)
        self.loads, self.most = [Load() for _ in replicas], cfg.agent.max_concurrency
        own, longest = cfg.rollout, cfg.rollout.val_max_response_length
        greedy = "baselines" in ADVANTAGE_ESTIMATORS.find(cfg.algorithm.adv_estimator).needs
        # Other seeds for evaluation than for training, whatever the prompts' ids.
        train_seed, val_seed = (cfg.trainer.seed, cfg.trainer.seed + 1) if seeded else (None, None)
        self.train = Sampling(own.n, own.temperature, train_seed, greedy=greedy)
        self.val = Sampling(own.val_n, own.val_temperature, val_seed, own.val_top_p, longest)

    async def setup(self) -> None:
        """Load all engines."""
        at_once = await every(self.cfg.trainer.start_timeout_s, "rollout", self.replicas, "start")
        self.most = min(self.most, *at_once)

    async def generate(self, prompts: list[Prompt], what: str, sampling: Sampling) -> tuple[list[Sample], float]:
        """All samples in the order of `prompts`, and the seconds of the slowest replica."""
        n = len(self.replicas)
        async with self.turn:
            if self.static or n == 1:
                calls = (self._call(i, prompts[i::n], what, sampling) for i in range(min(n, len(prompts))))
                work = asyncio.gather(*calls)
            else:
                work = self._spread(prompts, what, sampling)
            parts = await within(self.cfg.trainer.step_timeout_s, f"{what}, rollout", work)
        position = {p.id: i for i, p in enumerate(prompts)}
        samples = sorted((s for part, _ in parts for s in part), key=lambda s: (position[s.prompt_id], s.index))
        return samples, max(seconds for _, seconds in parts)

    async def _call(self, i: int, prompts: list[Prompt], what: str, sampling: Sampling) -> tuple[list[Sample], float]:
        return await named(f"{what}, rollout {i}", self.replicas[i].rollout.remote(prompts, sampling))

    async def _spread(self, prompts: list[Prompt], what: str, sampling: Sampling) -> list[tuple[list[Sample], float]]:
        """One part per prompt; the first failure is raised at once."""
        begin, calls, asked = time.perf_counter(), [], {}
        try:
            async with asyncio.TaskGroup() as group:
                for prompt in prompts:
                    while min(load.now for load in self.loads) >= self.most:
                        asked = {i: task for i, task in asked.items() if not task.done()}
                        for i in set(range(len(self.loads))) - asked.keys():
                            asked[i] = group.create_task(self._ask(i, what))
                        await asyncio.wait(asked.values(), return_when=asyncio.FIRST_COMPLETED)
                    i = min(range(len(self.loads)), key=lambda i: self.loads[i].now)
                    self.loads[i].sent += sampling.n + sampling.greedy
                    calls.append(group.create_task(self._one(i, prompt, what, sampling)))
                for task in asked.values():
                    task.cancel()
        except ExceptionGroup as e:  # as it is without a group
            raise e.exceptions[0] from e.exceptions[0].__cause__
        return [(samples, time.perf_counter() - begin) for samples, _ in (call.result() for call in calls)]

    async def _ask(self, i: int, what: str) -> None:
        """Wait until replica `i` has room, whatever is at its tools or still to be scored."""
        load = self.loads[i]
        load.away = await named(f"{what}, rollout {i}", self.replicas[i].vacancy.remote(load.sent, self.most))

    async def _one(self, i: int, prompt: Prompt, what: str, sampling: Sampling) -> tuple[list[Sample], float]:
        samples, seconds = await self._call(i, [prompt], what, sampling)
        self.loads[i].back += len(samples)
        return samples, seconds

    async def score(self, sequences: list[np.ndarray]) -> list[list[np.ndarray]]:
        """Each replica's half of the canary."""
        return await every(self.cfg.trainer.step_timeout_s, "canary, rollout", self.replicas, "score", sequences)

    async def sleep(self) -> None:
        """Free the devices for another role's turn; the next sync wakes the replicas."""
        await every(self.cfg.trainer.step_timeout_s, "rollout", self.replicas, "sleep")

    async def stop(self) -> None:
        """End all engines; what does not answer is left to be killed."""
        await every(15.0, "rollout", self.replicas, "stop")


class WeightSync:
    """The trainer's weights into every replica: verified by checksum, by name and by canary, or the run stops."""

    def __init__(
        self, actor: TrainGroup, rollout: RolloutGroup, canary: list[np.ndarray], host: str, near: list[list[int]]
    ) -> None:
        """`near`: per rank of the actor the vLLM workers on its device; they need no network."""
        self.actor, self.rollout, self.canary, self.host, self.near = actor, rollout, canary, host, near
        self.cfg = actor.cfg.weight_sync
        self.tolerance = self.cfg.canary_tolerance or {"float32": 1e-3, "bfloat16": 1.0}[actor.cfg.model.dtype]

    async def connect(self) -> None:
        """Exchange the metadata and form all groups, once."""
        limit, bucket_bytes, what = self.cfg.timeout_s, self.cfg.bucket_mb << 20, "weight sync, trainer rank"
        plans = await every(limit, what, self.actor.ranks, "weight_plan")
        self.senders = [rank for rank, plan in zip(self.actor.ranks, plans, strict=True) if plan]
        pieces = [plan for plan in plans if plan]
        self.total_bytes = BucketPlan.build(pieces, bucket_bytes).total_bytes
        replicas = self.rollout.replicas
        near = [those for those, plan in zip(self.near, plans, strict=True) if plan]
        receivers = len(replicas) * self.rollout.cfg.rollout.tensor_parallel_size
        info = {
            "pieces": [[astuple(piece) for piece in plan] for plan in pieces],
            "bucket_bytes": bucket_bytes,
            "addresses": await every(limit, what, self.senders, "open_sender", pieces, bucket_bytes, self.host, limit),
            "receivers": receivers,
            "near": near,
            "host": self.host,
            "timeout_s": limit,
        }
        await asyncio.gather(
            every(2 * limit, what, self.senders, "connect_sync", receivers, near),
            every(2 * limit, "weight sync, rollout", replicas, "connect_sync", info),
        )

    async def __call__(self, stamp: Stamp) -> dict[str, float]:
        """Bring every replica to `stamp`. Returns metrics: sync/bytes, sync/gb_per_s, seconds per phase, canary. Raises
        SyncError or PhaseTimeout, naming who, which phase, bucket and version."""
        begin, what = time.perf_counter(), f"weight sync of version {stamp[1]}"
        # Each wait inside has the limit timeout_s; this one is for what hangs outside of those.
        limit = 2 * self.cfg.timeout_s + self.total_bytes / SLOWEST_LINK
        sent, received = await asyncio.gather(
            every(limit, f"{what}, trainer rank", self.senders, "send_weights", stamp[1]),
            every(limit, f"{what}, rollout", self.rollout.replicas, "sync", stamp),
        )
        seconds = time.perf_counter() - begin
        size = sum(r["bytes"] for r in sent)
        metrics = {
            "sync/transfer_s": seconds,
            "sync/bytes": size,
            "sync/gb_per_s": size / seconds / 1e9,
            "sync/pack_s": max(r["pack"] for r in sent),
        }
        for phase in ("pause", "prepare", "wire", "load", "verify", "finish"):
            metrics[f"sync/{phase}_s"] = max(r.get(phase, 0.0) for r in received)
        canary = await self._check_canary(stamp)
        whole = time.perf_counter() - begin  # the replicas idle until the canary has passed, so it belongs to the sync
        return metrics | canary | {"time/sync_s": whole, "time/canary_s": whole - seconds}

    async def _check_canary(self, stamp: Stamp) -> dict[str, float]:
        trainer, replicas = await asyncio.gather(self.actor.score(self.canary), self.rollout.score(self.canary))
        found: dict[str, float] = {}
        for i, replica in enumerate(replicas):
            diffs = np.abs(np.concatenate(trainer) - np.concatenate(replica))
            # Noise of the dtype scatters, so its mean is far below its maximum; other weights shift the mean too.
            for kind, size, share, shown in (("max", diffs.max(), 1.0, ""), ("mean", diffs.mean(), 0.1, " / 10")):
                if not size <= share * self.tolerance:  # NaN fails too
                    raise SyncError(
                        f"canary after the sync of version {stamp[1]}: rollout replica {i} and the trainer differ by "
                        f"{size:.3g} nats on the same tokens ({kind}), "
                        f"more than weight_sync.canary_tolerance{shown} = {share * self.tolerance:g}"
                    )
                name = f"canary/logprob_diff_{kind}"
                found[name] = max(found.get(name, 0.0), float(size))
        return found
