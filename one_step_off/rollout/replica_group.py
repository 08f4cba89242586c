"""The groups of processes as the pipeline sees them: a few awaitable methods, each with a time limit.

`TrainGroup` is a role with a model on one or more ranks, `RolloutGroup` the vLLM replicas; `weight_sync.py` is the
bridge between the two. The pipeline is tested with stand-ins that have the same methods.
"""

import asyncio
import heapq
import itertools
import operator
import os
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from one_step_off.algorithms.advantages import ADVANTAGE_ESTIMATORS
from one_step_off.config.schema import Config, ConfigError
from one_step_off.data.samples import COLUMNS, NOWHERE, Arrays, Batch, Prompt, Sample, Samples, StalenessError
from one_step_off.rollout.health import Health, State
from one_step_off.rollout.vllm_replica import Sampling
from one_step_off.weight_sync.bucket_plan import SyncError

T = TypeVar("T")
OnSpan = Callable[[str, str, int, float, float], None]
"""Told of a role's work: (role, method, step, begin, end), in seconds of `now`."""

PING_S = 10.0  # so long a replica may take to say that it is there
LIVENESS_S = 5.0  # and any process to answer on the thread that is never busy
STOP_S = 10.0  # for all engines to end in good order
PAUSE_S = 0.2  # before one that may be ill is looked at again
ATTEMPTS = 3  # to start a lost one anew; and to have the same prompts answered


def now() -> float:
    """Seconds by the event loop's clock: on Linux that of time.perf_counter, unless a simulation counts its own."""
    return asyncio.get_running_loop().time()


class PhaseTimeout(RuntimeError):
    """A phase took longer than its limit."""


class RoleError(RuntimeError):
    """A process of a role failed; says which, in what, and why."""


class ProcessDied(RoleError):
    """It is gone."""


class TrainerDied(ProcessDied):
    """It was a trainer's: the attempt is over, whoever has noticed."""


class NoReplica(RoleError):
    """All replicas are lost, and none of them came back."""


class Lost(Exception):
    """A replica was given up while it was asked for something."""


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
            if "its node has died" in str(cause):
                who += ": its node is lost, or the network to it"
            pid = next((line.split()[-1] for line in lines if line.startswith("pid:")), "unknown")
            raise ProcessDied(f"{who}: its process died (pid {pid})") from e
        raise RoleError(f"{who}: {type(cause).__name__}: {lines[0]}") from e


def every(
    limit_s: float, what: str, actors: list[Any], method: str, *args: Any, each: list[tuple] | None = None
) -> Awaitable[list[Any]]:
    """Call a method on all actors at once, now, with `args` and with what is `each` one's own; awaiting it awaits all.
    The first failure is raised at once, and names the actor."""
    each = each or [()] * len(actors)
    sent = [getattr(a, method).remote(*args, *own) for a, own in zip(actors, each, strict=True)]
    calls = (named(f"{what} {i}, {method}", answer) for i, answer in enumerate(sent))
    return within(limit_s, f"{what}, {method}", asyncio.gather(*calls))


async def not_alive(processes: dict[str, Any]) -> dict[str, str]:
    """Which of these processes (name -> actor) are gone or stopped: name -> why. They are asked on a thread that is never
    busy: one that works, or waits for another one, answers."""

    async def why(who: str, actor: Any) -> str:
        try:
            await within(LIVENESS_S, who, named(who, actor.alive.remote()))
        except PhaseTimeout:
            return f"{who}: its process hangs, it did not answer in {LIVENESS_S:g} s"
        except Exception as e:
            return str(e)
        return ""

    reasons = await asyncio.gather(*(why(who, actor) for who, actor in processes.items()))
    return {who: reason for who, reason in zip(processes, reasons, strict=True) if reason}


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
            begin = now()
            answers = await every(self.limit, f"step {step}, {self.role}", self.ranks, method, *args)
            self.on_span(self.role, method, step, begin, now())
        return answers

    async def update(self, batch: Batch, learn: bool = True) -> dict[str, float]:
        """One training step on all ranks; returns its metrics. Without `learn` it counts and nothing changes."""
        own = self.cfg.trainer  # the workers may stand in another directory
        profile = os.path.abspath(f"{own.output_dir}/profile") if batch.step == own.profile_step else ""
        return (await self._in_turn(batch.step, "update", _put(batch), learn, profile))[0]

    async def log_prob(self, batch: Batch) -> list[np.ndarray]:
        """Log-probs (nats) of all response tokens at the current weights: one float32 [R] per sample."""
        return merged(await self._in_turn(batch.step, "log_prob", _put(batch)))

    async def log_prob_and_squares(self, batch: Batch) -> list[np.ndarray]:
        """As `log_prob`, float32 [R, 2]: beside each log-prob the sum of all the vocabulary's squared probabilities."""
        return merged(await self._in_turn(batch.step, "log_prob_and_squares", _put(batch)))

    async def values(self, batch: Batch) -> list[np.ndarray]:
        """The critic's values of the states before all response tokens: one float32 [R] per sample."""
        return merged(await self._in_turn(batch.step, "values", _put(batch)))

    def score(self, sequences: list[np.ndarray]) -> Awaitable[list[np.ndarray]]:
        """The trainer's half of the canary: log-probs of every token but the first, at temperature 1, by the weights as
        they are now, whatever is called before this is awaited."""
        answers = every(self.limit, f"canary, {self.role}", self.ranks, "score", sequences)

        async def whole() -> list[np.ndarray]:
            return next(filter(None, await answers))

        return asyncio.ensure_future(whole())

    async def save_state(self, folder: str) -> Awaitable[Any]:
        """Let all ranks copy their part of a checkpoint; when the answer has been awaited it is written."""
        await every(self.limit, f"checkpoint, {self.role}", self.ranks, "save_state", folder)
        return every(self.limit, f"checkpoint, {self.role}", self.ranks, "saved")

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
    """Into Ray's object store once, however many roles and ranks read it; without what none of them reads."""
    import ray

    now, (before, stored) = [batch.samples, *(getattr(batch, name) for name in COLUMNS)], batch.stored
    if not all(map(operator.is_, now, before)):
        columns = {name: v and Arrays(v) for name, v in zip(COLUMNS, now[1:], strict=True)}
        samples = Samples(batch.samples)
        samples.leave = "response", "extra"
        stored = ray.put(replace(batch, samples=samples, prob_squares=None, dropped=[], stored=NOWHERE, **columns))
        batch.stored = now, stored
    return stored


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

    A replica that dies or hangs is started anew in the background (`lose`). Meanwhile the others make what it had not
    returned, with the same weights; it serves again when `restore` has brought it to them.
    """

    def __init__(self, replicas: list[Any], cfg: Config, seeded: bool, turn: Any = None, respawn: Any = None) -> None:
        """`turn`: shared with the other roles in the pool, if there are any. `respawn`: called with the number of a replica
        it ends what is left of that and returns a new one in its place; None: to lose one ends the run."""
        self.all, self.cfg, self.respawn = list(replicas), cfg, respawn
        self.turn, self.shared = turn or nullcontext(), turn is not None
        self.health = [Health(cfg.rollout.heartbeat_timeout_s, cfg.rollout.progress_timeout_s) for _ in replicas]
        self.families: list[Any] = [()] * len(replicas)
        self.returning: dict[int, asyncio.Future] = {}  # replicas that are restarted; failed: left out for good
        self.losses = defaultdict(asyncio.Future)  # of those that were asked for something; done: it was lost
        self.restarts, self.syncing = 0, False
        self.say: Callable[[str], None] = lambda line: None
        self.on_trace: Callable[[list[tuple[str, str, Any, float, float]]], None] = lambda spans: None
        self.worked = defaultdict(dict)  # at what, who: (from when, to when)
        self.drawn: dict[tuple[int, str], float] = {}  # to when, in the timeline
        self.restore: Callable[[int], Awaitable[bool]] | None = None  # verified weights into one; see WeightSync
        self.static = cfg.rollout.routing == "static" or (cfg.rollout.routing == "auto" and seeded)
        self.loads, self.most = [Load() for _ in replicas], cfg.agent.max_concurrency
        own, seed, longest = cfg.rollout, cfg.trainer.seed, cfg.rollout.val_max_response_length
        greedy = "baselines" in ADVANTAGE_ESTIMATORS.find(cfg.algorithm.adv_estimator).needs
        self.train = Sampling(own.n, own.temperature, seed if seeded else None, greedy=greedy)
        # Other seeds for evaluation than for training, whatever the prompts' ids.
        self.val = Sampling(own.val_n, own.val_temperature, seed + 1 if seeded else None, own.val_top_p, longest)

    @property
    def active(self) -> list[int]:
        """Those that take part in syncs: all but what is being started anew."""
        return [i for i in range(len(self.all)) if i not in self.returning]

    async def setup(self) -> None:
        """Load all engines."""
        started = await every(self.cfg.trainer.start_timeout_s, "rollout", self.all, "start")
        at_once, self.families = map(list, zip(*started, strict=True))
        self.most = min(self.most, *at_once)

    async def watch(self) -> None:
        """Ask every replica again and again whether it is there, and give up what is not; runs until it is cancelled. Raises
        TrainerDied: that was noticed when a restarted replica was to get its weights."""
        while True:
            for task in self.returning.values():
                failed = task.done() and not task.cancelled()
                if failed and isinstance(error := task.exception(), TrainerDied):
                    raise error
            await asyncio.gather(*(self._look(i) for i in self.active))
            await asyncio.sleep(self.cfg.rollout.heartbeat_s)

    async def _look(self, i: int) -> None:
        health = self.health[i]
        if health.state is State.STALE:  # in a sync, which has limits of its own
            return health.begin(time.monotonic())
        try:
            health.heartbeat(time.monotonic(), *await self._ping(i))
        except PhaseTimeout:
            health.missed()
        except RoleError as e:
            return self.lose(i, str(e))
        if health.state is not State.STALE and (fault := health.fault(time.monotonic())):
            self.lose(i, fault)

    def _ping(self, i: int) -> Awaitable[tuple[int, int]]:
        return within(PING_S, f"rollout {i}", named(f"rollout {i}", self.all[i].ping.remote()))

    async def not_alive(self, numbers: list[int]) -> dict[int, str]:
        """Which of these replicas are gone or stopped, or have lost their engine: number -> why. A busy one is not."""
        names = {f"rollout {i}": i for i in numbers}
        reasons = await not_alive({who: self.all[i] for who, i in names.items()})
        return {names[who]: why for who, why in reasons.items()}

    def lose(self, i: int, why: str) -> None:
        """Give a replica up and start it anew in the background. Raises ProcessDied where there is no room for that
        beside the work of the others in its pool."""
        if i in self.returning:
            return
        self._give_up(i, why)
        self.say(f"rollout {i} is lost ({why}); it is started anew")
        self.restarts += 1
        self.returning[i] = asyncio.create_task(self._revive(i))
        self.returning[i].add_done_callback(lambda task: task.cancelled() or task.exception())  # `serving` raises it

    def leave_out(self, i: int, why: str) -> None:
        """Give a replica up for good: a new start would not help. Raises as `lose`."""
        self._give_up(i, why)
        if i in self.returning:
            self.returning[i].cancel()
        with suppress(ValueError):  # a stand-in's
            import ray

            ray.kill(self.all[i])  # it may hang, and hold its device
        self.say(f"rollout {i} is left out from now on: {why}")
        self.returning[i] = asyncio.get_running_loop().create_future()
        self.returning[i].set_exception(RoleError(f"rollout {i}: {why}"))
        self.returning[i].exception()  # noted; `serving` raises it

    def _give_up(self, i: int, why: str) -> None:
        if self.shared or not self.respawn:
            raise ProcessDied(f"rollout {i}: {why}")
        self.health[i].to(State.DEAD)
        if loss := self.losses.pop(i, None):
            loss.set_result(None)
        self.loads[i] = Load()

    async def _revive(self, i: int) -> None:
        limit, what, begin = self.cfg.trainer.start_timeout_s, f"rollout {i} anew", time.monotonic()
        for left in reversed(range(ATTEMPTS)):
            try:
                self.all[i] = self.respawn(i)
                ((_, self.families[i]),) = await every(limit, what, [self.all[i]], "start", self.families[i])
                self.health[i].to(State.STALE)
                if not await self.restore(i):
                    raise Lost("it died in its first sync")
                del self.returning[i]
                return self.say(f"rollout {i} is back after {time.monotonic() - begin:.1f} s")
            except TrainerDied:  # no other start of this replica helps; `watch` raises it
                raise
            except Exception as e:  # whatever it is, the others go on
                self.say(f"{what}: {e}" + ("" if left else "; it is left out from now on"))
                self.health[i].to(State.DEAD)
                if not left:
                    raise

    async def serving(self) -> list[int]:
        """Those that may be given prompts; where all are being started anew, waits for the first. Raises NoReplica."""
        while not (ready := [i for i in self.active if self.health[i].state is State.HEALTHY]):
            if not self.syncing and not any(self.health[i].state is State.SUSPECT for i in self.active):
                await self._wait_for_one()
            await asyncio.sleep(PAUSE_S)
        return ready

    async def somebody(self) -> None:
        """Wait until there is a replica for a sync, whatever weights it has. Raises NoReplica."""
        while not self.active:
            await self._wait_for_one()

    async def _wait_for_one(self) -> None:
        """Until one that is being started anew is there, or given up. Raises NoReplica: all are."""
        alive = [task for task in self.returning.values() if not task.done()]
        if not alive:
            self.syncing = False  # who waits for a sync to end is to learn it too
            why = "; ".join(str(x.exception()) for x in self.returning.values()) or "they hold no verified weights"
            raise NoReplica(f"no replica is left, and none could be started anew: {why}")
        await asyncio.wait(alive, return_when=asyncio.FIRST_COMPLETED)

    async def _ask(self, i: int, what: str, method: str, *args: Any) -> Any:
        """Call a method of a replica. Raises Lost: it was given up meanwhile."""
        name, lost, begin = f"{what}, rollout {i}", self.losses[i], time.time()
        call = asyncio.ensure_future(named(name, getattr(self.all[i], method).remote(*args)))
        try:
            await asyncio.wait([call, lost], return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                raise Lost(name)
            if isinstance(error := call.exception(), RoleError) and await self.not_alive([i]):
                self.lose(i, str(error))
                raise Lost(name) from error
            if method == "rollout" and not error:
                first, _ = self.worked[what].get(i, (begin, None))
                self.worked[what][i] = min(begin, first), time.time()
            return call.result()
        finally:
            call.cancel()

    async def generate(
        self, prompts: list[Prompt], what: str, sampling: Sampling, land: Callable[[list[Sample]], None] | None = None
    ) -> tuple[list[Sample], float]:
        """All samples in the order of `prompts`, and the seconds that they took. `land` is told of each prompt's samples as
        they come. Raises NoReplica, and what a replica raised that is there."""
        async with self.turn:
            begin, work = now(), self._shared_out(prompts, what, sampling, land)
            steps = 2 + self.cfg.pipeline.max_carry if land else 1  # in which these may be under way
            samples = await within(steps * self.cfg.trainer.step_timeout_s, f"{what}, rollout", work)
            seconds = now() - begin
        kind, lane = ("evaluate", " evaluation") if sampling is self.val else ("generate", "")
        step, worked = what.partition(",")[0].split()[-1].strip("v"), self.worked.pop(what, {})
        # Of several at once each is drawn from where the one before ended.
        begins = {i: max(start, self.drawn.get((i, kind), 0.0)) for i, (start, _) in worked.items()}
        ends = {i: end for i, (_, end) in worked.items() if begins[i] < end}
        self.drawn |= {(i, kind): end for i, end in ends.items()}
        self.on_trace([(f"rollout {i}{lane}", kind, step, begins[i], end) for i, end in ends.items()])
        position = {p.id: i for i, p in enumerate(prompts)}
        return sorted(samples, key=lambda s: (position[s.prompt_id], s.index)), seconds

    async def _shared_out(
        self, prompts: list[Prompt], what: str, sampling: Sampling, land: Callable | None, losses: int = 0
    ) -> list[Sample]:
        """All samples, in any order; the first failure is raised at once. `losses`: how often a replica was lost that had
        these prompts."""
        calls, asked, left = [], {}, deque(prompts)

        async def share(i: int, load: Load, own: list[Prompt]) -> list[Sample]:
            if self.health[i].state is not State.HEALTHY:  # a sync began since they were given out; its call went first
                load.sent -= len(own) * sampling.size
                return await self._shared_out(own, what, sampling, land, losses)
            try:
                samples = await self._ask(i, what, "rollout", own, sampling)
            except Lost as e:
                if losses + 1 >= ATTEMPTS:  # they may be what replicas die of
                    raise ProcessDied(f"{e}: {ATTEMPTS} replicas in a row were lost with the same prompts") from e
                return await self._shared_out(own, what, sampling, land, losses + 1)
            load.back += len(samples)
            if land:
                land(samples)
            return samples

        try:
            async with asyncio.TaskGroup() as group:
                while left:
                    ready, shares = await self.serving(), defaultdict(list)
                    for i, prompt in self._give(ready, left, sampling.size, in_turn=not land):
                        # What a replica gets at a time is one call, for calls cost more than samples, if nobody waits for each.
                        shares[i, prompt.id if land else None].append(prompt)
                        self.loads[i].sent += sampling.size  # now, for others may share out before the call is made
                    for (i, _), own in shares.items():
                        calls.append(group.create_task(share(i, self.loads[i], own)))
                    if left:
                        asked = {i: task for i, task in asked.items() if not task.done()}
                        asked |= {i: group.create_task(self._room(i, what)) for i in ready if i not in asked}
                        await asyncio.wait(asked.values(), return_when=asyncio.FIRST_COMPLETED)
                for task in asked.values():
                    task.cancel()
        except ExceptionGroup as e:  # as it is without a group
            raise e.exceptions[0] from e.exceptions[0].__cause__
        return [sample for call in calls for sample in call.result()]

    def _give(self, ready: list[int], left: deque[Prompt], size: int, in_turn: bool) -> Iterator[tuple[int, Prompt]]:
        """Take what replicas are to be given now out of `left`, prompts of `size` trajectories: with `in_turn` all, if so
        they are shared out; else to the one that has least to do, as long as it has room."""
        if in_turn and (self.static or len(self.all) == 1):
            yield from zip(itertools.cycle(ready), list(left))
            left.clear()
        heap = sorted((self.loads[i].now, i) for i in ready)
        while left and heap[0][0] < self.most:
            load, i = heap[0]
            heapq.heapreplace(heap, (load + size, i))
            yield i, left.popleft()

    async def _room(self, i: int, what: str) -> None:
        """Wait until replica `i` has room, whatever is at its tools or still to be scored; or is lost."""
        load = self.loads[i]
        with suppress(Lost):
            load.away = await self._ask(i, what, "vacancy", load.sent, self.most)

    async def sleep(self) -> None:
        """Free the devices for another role's turn; the next sync wakes the replicas."""
        await every(self.cfg.trainer.step_timeout_s, "rollout", self.all, "sleep")

    async def stop(self) -> None:
        """End all engines; what does not answer is left to be killed."""
        for task in self.returning.values():
            task.cancel()
        ends = asyncio.gather(*(replica.stop.remote() for replica in self.all), return_exceptions=True)
        await within(STOP_S, "rollout, stop", ends)
