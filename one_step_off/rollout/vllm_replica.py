"""Generation: one vLLM `AsyncLLM` per replica, as a plain class that becomes a Ray actor.

A replica turns prompts into scored samples whose every token carries the stamp of the weights that made it.
Its engine is told the stamp after each verified sync; before the first one it generates nothing.
"""

import asyncio
import contextlib
import functools
import gc
import hashlib
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psutil
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from agent_loop.base import Generated, Loops
from agent_loop.tools import LISTED
from one_step_off.cluster.errors import SyncError
from one_step_off.cluster.network import reachable_host
from one_step_off.cluster.resource_usage import UsageProbe
from one_step_off.config.errors import ConfigError
from one_step_off.config.roles import load_section_tokenizer
from one_step_off.config.schema import Config
from one_step_off.config.user_code import (
    LOG_FOLDER,
    MAX_MESSAGE_CHARS,
    describe_error,
    format_traceback,
    log_traceback,
    quote_response,
)
from one_step_off.data.packing import PackedSamples
from one_step_off.data.samples import Prompt, Sample, Stamp
from one_step_off.rewards.functions import named_functions
from one_step_off.rewards.reward import Reward, RewardError, RewardItem, Score
from one_step_off.rewards.verifiers import REWARD_FUNCTIONS


@dataclass(frozen=True)
class Sampling:
    """How to sample: n trajectories per prompt at a temperature (0: greedy). `seed` None: unseeded. `top_p` other than
    1 shifts log-probs, so it is for evaluation only. `max_tokens` None: as in training. `greedy`: one more response, at
    temperature 0, with index n and `extra["greedy"]`: a baseline, never trained on."""

    n: int
    temperature: float
    seed: int | None
    top_p: float = 1.0
    max_tokens: int | None = None
    greedy: bool = False

    @property
    def size(self) -> int:
        """Trajectories of each prompt, the greedy one too."""
        return self.n + self.greedy


def sample_seed(seed: int, prompt_id: tuple[int, int], index: int, turn: int = 0) -> int:
    """A seed of its own for each sample and turn: 63 bits of a hash of (run seed, epoch, row, index, turn).
    Neighbouring integers would not do: vLLM derives further seeds by adding to them, so they would collide."""
    text = f"{seed}/{prompt_id[0]}/{prompt_id[1]}/{index}" + (f"/{turn}" if turn else "")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def engine_seed(seed: int, incarnation: int, replica: int, start: int) -> int:
    """The seed of one engine, for samples without a seed of their own: 31 bits (numpy takes 32) of a hash of the run's
    seed, the trainer's incarnation, the replica's index and which start of that replica this is.

    With one seed for all, the k-th request of every replica, and of every restarted one, would get the same noise: vLLM
    draws it from generators that each engine seeds at its start. All workers of an engine must have the same seed.
    """
    text = f"engine/{seed}/{incarnation}/{replica}/{start}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


def stamps_of(spans: Any, length: int) -> tuple[int, np.ndarray]:
    """vLLM's spans of weight versions, labelled "incarnation.version", as (incarnation, int32 [length]). Raises
    RuntimeError: some tokens carry no stamp, or the stamps are of two incarnations."""
    versions = np.full(length, -1, dtype=np.int32)
    incarnations = set()
    for span in spans or ():
        incarnation, version = span.version.split(".")
        versions[span.start : span.end] = int(version)
        incarnations.add(int(incarnation))
    if (length and len(incarnations) != 1) or (versions < 0).any():
        raise RuntimeError(
            f"the engine stamped {length} tokens with {spans}: one known version each was expected"
        )
    return next(iter(incarnations), 0), versions


class RewardQueue:
    """Spreads finished trajectories over the scorers: while all of them are at work, the next calls fill up."""

    def __init__(self, scorers: list[Any], first: int = 0) -> None:
        """`first`: which to begin with, another one for each replica."""
        self.idle, self.workers = deque(enumerate(scorers)), len(scorers)
        self.idle.rotate(-first)
        self.waiting: deque[tuple[RewardItem, asyncio.Future]] = deque()
        self.tasks: set[asyncio.Task] = set()  # asyncio itself keeps no task alive

    async def score(self, item: RewardItem) -> Score | RewardError:
        """What `Scorer.score_batch` says of one trajectory."""
        future = asyncio.get_running_loop().create_future()
        self.waiting.append((item, future))
        if self.idle:
            self.tasks.add(task := asyncio.create_task(self._work_off(*self.idle.popleft())))
            task.add_done_callback(self.tasks.discard)
        return await future

    async def _work_off(self, number: int, scorer: Any) -> None:
        while self.waiting:
            # A share of what waits: the others come back soon and want their part.
            batch = [self.waiting.popleft() for _ in range(-(-len(self.waiting) // self.workers))]
            scores, error = [None] * len(batch), None
            try:
                scores = await self._scored(scorer, [item for item, _ in batch])
            except Exception as e:
                gone = RuntimeError(
                    f"reward worker {number}: its process died and did not come back"
                )
                error = gone if isinstance(e, ActorDiedError) else e
            for score, (_, future) in zip(scores, batch, strict=True):
                if not future.done():  # its trajectory was cancelled
                    future.set_exception(error) if error else future.set_result(score)
        self.idle.append((number, scorer))

    async def _scored(
        self, scorer: Any, items: list[RewardItem], deaths: int = 0
    ) -> list[Score | RewardError]:
        """Each alone once the process has died of one of them and Ray has started it anew. To blame is who then kills it
        twice: once may have been another replica's sample."""
        if (found := await self._answer(scorer, items)) is not None:
            return found
        while await self._answer(scorer, []) is None:  # or the next would be lost to the same death
            await asyncio.sleep(0.2)
        if deaths == 2 - len(items) == 1:
            killed = "killed the process of the reward function, or sat in C code too long, twice"
            where = f"its last words are in {LOG_FOLDER}/ of the run folder"
            return [
                RewardError(f"{items[0]}: {killed}; {where}; {quote_response(items[0].response)}")
            ]
        return [
            score for item in items for score in await self._scored(scorer, [item], len(items) == 1)
        ]

    async def _answer(
        self, scorer: Any, items: list[RewardItem]
    ) -> list[Score | RewardError] | None:
        """None: its process has died, and Ray is about to start it anew."""
        with contextlib.suppress(ActorUnavailableError):
            return await scorer.score_batch.remote(items)


class Room(asyncio.Semaphore):
    """The places of a replica. `away`: trajectories that ask nothing of the engine: at their tools, judged, or over since
    its start."""

    def __init__(self, places: int) -> None:
        super().__init__(places)
        self.away, self.left = 0, asyncio.Event()


class Place:
    """One trajectory's place among `agent.max_concurrency`: free while it is judged, taken again by its next turn. And its
    time: what its loop waits for is not its own, nor is what `failed` there its fault."""

    def __init__(self, room: Room, limit_s: float) -> None:
        """`limit_s`: how long the loop's own code may take in one go."""
        self.room, self.held, self.over, self.away, self.turn = (
            room,
            False,
            False,
            False,
            asyncio.Lock(),
        )
        self.limit, self.busy, self.begun, self.failed = limit_s, 0, [0, 0], []

    def ask(self, nothing: bool) -> None:
        """Note whether the engine is asked for something. A place is kept meanwhile."""
        self.room.away += nothing - self.away
        self.away = nothing
        self.room.left.set()
        self.room.left.clear()  # whoever waits by now has been woken, and looks again

    async def take(self) -> None:
        """Wait for it, unless it is held; a loop may ask for several turns at once."""
        self.ask(nothing=self.over)
        async with self.turn:
            if not self.held and not self.over:
                await self.room.acquire()
                self.held = True
        if self.over:  # the trajectory ended meanwhile
            self.leave()

    def leave(self, over: bool = False) -> None:
        """Give it to another trajectory, if it is held; for good where the trajectory is `over`."""
        self.over |= over
        self.ask(nothing=True)
        if self.held:
            self.held = False
            self.room.release()

    @contextlib.asynccontextmanager
    async def at_work(self, engine: bool) -> AsyncIterator[None]:
        """The engine is, or the reward function, until its end."""
        self.begun[time.monotonic() > self.begin + self.limit] += 1
        self.busy += 1
        try:
            if engine:
                await self.take()
            else:
                self.leave()  # another trajectory generates meanwhile
            yield
        except Exception as e:
            self.failed.append(e)
            raise
        finally:
            self.ask(nothing=True)
            self.busy, self.since = self.busy - 1, time.monotonic()

    async def watch(self, loop: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """What the loop returns, or the exception that ended it. TimeoutError: its own code takes too long, or the limit is
        over and it asks for as much again. Then it is cancelled, and not waited for."""
        await self.take()
        task, self.begin = asyncio.create_task(loop()), time.monotonic()
        self.since = self.begin
        try:
            while (self.busy or time.monotonic() < self.since + self.limit) and self.begun[
                1
            ] <= self.begun[0]:
                if (await asyncio.wait([task], timeout=self.limit))[0]:
                    break
        finally:
            task.cancel()
            self.leave(over=True)
        late = TimeoutError(
            f"it did not end in {self.limit:g} s, twice agent.timeout_s and agent.tool_timeout_s"
        )
        return (await asyncio.gather(task, return_exceptions=True) if task.done() else [late])[0]


class RolloutReplica(UsageProbe):
    """One vLLM engine (tensor_parallel_size GPUs) and everything that talks to it."""

    calls_at_once = (
        1 << 14
    )  # Ray's own limit, 1000, is less than the prompts that may be scored at a time
    threads = {"control": 1}  # an event loop of its own for `alive`

    def __init__(
        self,
        cfg: Config,
        index: int,
        device: str,
        scorers: list[Any],
        listed: Any = (),
        loops: Sequence[str] = ("",),
        seed: int = 0,
    ) -> None:
        """`listed`: the driver's `agent_loop.tools.LISTED`. `loops`: the names of those that the data uses. `seed`: of the
        engine, see `engine_seed`."""
        self.cfg, self.index, self.device, self.used = cfg, index, device, loops
        self.seed = seed
        LISTED.update(listed)
        self.rewards = RewardQueue(scorers, index)
        self.room = Room(cfg.agent.max_concurrency)
        self.stamp: Stamp | None = None
        self.incarnation = 0
        self.engine: Any = None
        self.requests = self.done = 0
        self.asleep = False
        self.engine_processes: list[psutil.Process] = []

    async def start(
        self, former: Sequence[tuple[int, float]] = ()
    ) -> tuple[int, list[tuple[int, float]]]:
        """Load the engine; returns how many sequences it works on at once, and its processes: number and time of birth.
        `former`: those of a replica that died in this place: an engine may outlive it, and would keep its memory."""
        for pid, born in former:
            with contextlib.suppress(psutil.Error):
                if psutil.Process(pid).create_time() == born:
                    psutil.Process(pid).kill()
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.tokenizer = load_section_tokenizer(self.cfg, "model")
        for name in self.used:  # now, because all trajectories would wait for them later
            self.loops.get(name)
        self.engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**engine_args(self.cfg, self.device, self.seed))
        )
        gc.collect()
        gc.freeze()  # modules and engine stay: to look through them again and again would stop all trajectories meanwhile
        children = psutil.Process().children(recursive=True)
        self.engine_processes = [child for child in children if _is_engine(child)]
        family = [(child.pid, child.create_time()) for child in children]
        return self.engine.vllm_config.scheduler_config.max_num_seqs, family

    async def connect_sync(self, info: dict[str, Any], first_receiver: int) -> None:
        """Join the weight-sync groups of a new epoch. `info`: what `vllm_receiver` takes and replicas share;
        `first_receiver`: the number of this replica's first worker. Raises SyncError."""
        own = {"host": reachable_host(info["host"]), "first_receiver": first_receiver}
        await self._call_workers("connect_sync", info | own)

    async def _call_workers(self, method: str, *args: Any) -> list[Any]:
        try:
            return await self.engine.collective_rpc(method, args=args)
        except Exception as e:  # vLLM passes on no type of its workers' errors, only their text
            text = str(e).strip().splitlines() or [type(e).__name__]
            raise SyncError(text[-1].removeprefix("Call to collective_rpc method failed: ")) from e

    async def sync(self, stamp: Stamp) -> list[dict[str, Any]]:
        """Receive the weights `stamp`: pause, stream, verify, resume with empty caches; with partial rollouts what is
        unfinished goes on then, its KV cache computed anew. Returns per worker seconds per
        phase (pause, wait, load, verify, ...), bytes, and what `WeightReceiver.receive` tells besides. Raises SyncError: the
        engine stays paused then, and generates nothing until a sync has ended well."""
        self.stamp, self.incarnation, begin = None, stamp[0], time.perf_counter()
        mode = "keep" if self.cfg.pipeline.partial_rollout else "wait"
        # Not AsyncLLM.pause_generation, which sleeps 20 ms besides, for callers to whom the order of outputs matters.
        await self.engine.engine_core.pause_scheduler_async(mode=mode, clear_cache=True)
        pause = time.perf_counter() - begin
        if self.asleep:
            await self.engine.wake_up(["weights"])
        reports = await self._call_workers("sync_weights", stamp[1])
        if self.asleep:
            await self.engine.wake_up(["kv_cache"])
            self.asleep = False
        await self.engine.update_weight_version(f"{stamp[0]}.{stamp[1]}")
        await self.engine.resume_generation()
        self.stamp = stamp
        return [report | {"pause": pause} for report in reports]

    async def ping(self) -> tuple[int, int]:
        """Answer, once the engine has, between two of its steps: how many requests it has finished, and how many it works
        on. Raises RuntimeError: it died."""
        if self.engine.errored:
            raise RuntimeError(f"the engine of rollout replica {self.index} died")
        await self.engine.is_sleeping()
        return self.done, self.requests - self.done

    @ray.method(concurrency_group="control")
    async def alive(self) -> None:
        """Answer, however busy this process and its engine are. Raises RuntimeError: the engine died, or is stopped."""
        if self.engine is not None and self.engine.errored:
            raise RuntimeError(f"the engine of rollout replica {self.index} died")
        for process in self.engine_processes:
            if state := _not_running(process):
                raise RuntimeError(
                    f"the engine of rollout replica {self.index}, process {process.pid}, is {state}"
                )

    async def sleep(self) -> None:
        """Give the memory to another role; weights come with the next sync. A CPU engine has nothing to do but idle."""
        self.stamp = None
        if self.device == "cuda" and not self.asleep:
            await self.engine.sleep(level=2)
            self.asleep = True

    async def rollout(self, prompts: list[Prompt], sampling: Sampling) -> list[Sample]:
        """All trajectories of these prompts, scored, in order. Raises RuntimeError: no verified weights, or the engine
        died."""
        if self.stamp is None:
            raise RuntimeError(f"rollout replica {self.index} has no verified weights")
        tasks = [
            asyncio.create_task(self._trajectory(p, i, sampling))
            for p in prompts
            for i in range(sampling.size)
        ]
        try:
            return PackedSamples(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def wait_for_capacity(self, sent: int, most: int) -> int:
        """How many trajectories ask nothing of the engine (`Room.away`); once the others of those `sent` since the start
        are fewer than `most`. The caller counts what it sent, because its calls may arrive in another order."""
        while sent - self.room.away >= most:
            await self.room.left.wait()
        return self.room.away

    @functools.cached_property
    def loops(self) -> Loops:
        """The agent loops, by name."""
        return Loops(self.cfg, self.tokenizer)

    async def _trajectory(self, prompt: Prompt, index: int, sampling: Sampling) -> Sample:
        greedy, turns, wrong = index == sampling.n, itertools.count(), {}
        said: list[Generated] = []
        how, extra = (
            (replace(sampling, temperature=0.0), {"greedy": True}) if greedy else (sampling, {})
        )
        place = Place(self.room, 2 * (self.cfg.agent.timeout_s + self.cfg.agent.tool_timeout_s))

        async def generate(ids: np.ndarray, max_tokens: int) -> Generated:
            turn, own = next(turns), sampling.seed
            seed = None if own is None else sample_seed(own, prompt.id, index, turn)
            async with place.at_work(engine=True):
                said.append(await self._generate(ids, max_tokens, seed, how))
                return said[-1]

        async def score(response: str) -> Reward | None:
            async with place.at_work(engine=False):
                found = await self.rewards.score(self._item(prompt, index, response))
                wrong.clear()
                wrong.update(self._fault(found))
            return None if wrong else Reward.of(found)

        async def whole() -> Sample:
            limits = self.loops.limits(sampling.max_tokens or self.cfg.data.max_response_length)
            talk = await self.loops.get(prompt.agent_loop).run(prompt, generate, score, limits)
            sample, last = (
                talk.sample(prompt, index),
                [s for s in talk.segments if s.role == "assistant"][-1],
            )
            text = functools.partial(self.tokenizer.decode, skip_special_tokens=True)
            sample.response = text(sample.response_ids)
            if talk.reward is None:
                reward = await score(text(last.ids) if len(talk.segments) > 1 else sample.response)
            elif (reward := Reward.of(talk.reward)) is None:
                raise ValueError(f"its reward is {talk.reward!r:.200}")
            sample.reward = 0.0 if reward is None else reward.total
            if reward is not None and reward.parts:
                sample.extra["reward_parts"] = reward.parts
            sample.extra |= extra | (wrong or self._fault(None if talk.late else 0.0))
            return sample

        made = await place.watch(whole)
        if place.failed or isinstance(made, ConfigError):  # whatever the loop made of it
            raise [*place.failed, made][0]
        return made if isinstance(made, Sample) else self._unmade(prompt, index, made, extra, said)

    def _item(self, prompt: Prompt, index: int, response: str) -> RewardItem:
        """What the scorers receive. The row's other columns may be large, so built-in functions are not sent them."""
        own = any(name not in REWARD_FUNCTIONS for name in named_functions(self.cfg.reward))
        columns = prompt.extra if own else {}
        given = prompt.text, response, prompt.ground_truth, prompt.data_source
        return RewardItem(prompt.id, index, *given, extra_info=columns, where=prompt.where)

    def _fault(self, found: Score | RewardError) -> dict[str, str]:
        """For a sample's `extra`: what is wrong with its reward, if anything. Raises it, with `reward.on_error=stop`."""
        if isinstance(found, RewardError) and self.cfg.reward.on_error == "stop":
            raise found
        if isinstance(found, RewardError):
            return {"fault": found.kind, "error": str(found)}
        return (
            {}
            if found is not None
            else {"fault": "reward/timeouts", "error": "not judged within reward.timeout_s"}
        )

    def _unmade(
        self,
        prompt: Prompt,
        index: int,
        error: BaseException,
        extra: dict[str, Any],
        said: Sequence[Generated] = (),
    ) -> Sample:
        """A sample without tokens, in place of what a loop did not end well. `said`: the policy's turns until then. Raises
        RewardError, as `_fault`."""
        what = f"agent loop {prompt.agent_loop or self.cfg.agent.loop}, {self._item(prompt, index, '')}"
        failed = f"{what}: raised {describe_error(error)}: {str(error):.{MAX_MESSAGE_CHARS}}"
        if said:
            failed += (
                f"; {quote_response(self.tokenizer.decode(said[0].ids, skip_special_tokens=True))}"
            )
        details = format_traceback(error)
        log_traceback(failed, details)
        extra |= self._fault(RewardError(failed, "agent/errors", details))
        given = (
            prompt.id,
            index,
            prompt.ids,
            *(np.zeros(0, dtype) for dtype in ("i4", "f4", "?", "i4")),
        )
        return Sample(
            *given, incarnation=self.incarnation, reward=0.0, finish_reason="error", extra=extra
        )

    async def _generate(
        self, ids: np.ndarray, max_tokens: int, seed: int | None, sampling: Sampling
    ) -> Generated:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        own = self.cfg.rollout.sampling_kwargs
        how = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": max_tokens,
            "seed": seed,
        }
        how |= {"logprobs": 0, "flat_logprobs": True, "output_kind": RequestOutputKind.FINAL_ONLY}
        params = SamplingParams(**how, **{"detokenize": "stop" in own} | own)
        done = (await self._run(ids, params)).outputs[0]
        tokens = np.asarray(done.token_ids, dtype=np.int32)
        incarnation, versions = stamps_of(done.weight_versions, len(tokens))
        log_probs = np.asarray(done.logprobs.logprobs, dtype=np.float32)
        if len(log_probs) != len(tokens):
            raise RuntimeError(
                f"the engine gave {len(log_probs)} log-probs for {len(tokens)} tokens"
            )
        return Generated(tokens, log_probs, versions, incarnation, str(done.finish_reason))

    async def score(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        """The engine's log-probs (nats, temperature 1) of every token but the first: the canary's half."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)

        async def one(ids: np.ndarray) -> np.ndarray:
            rows = (await self._run(ids, params)).prompt_logprobs[1:]
            return np.array(
                [row[int(t)].logprob for row, t in zip(rows, ids[1:], strict=True)], np.float32
            )

        return await asyncio.gather(*(one(ids) for ids in sequences))

    async def _run(self, ids: np.ndarray, params: Any) -> Any:
        self.requests += 1
        params.skip_clone = True  # it is this request's alone
        # As if rendered already: else each prompt would travel through a thread that has nothing to tokenise.
        prompt = {"type": "token", "prompt_token_ids": ids.tolist()}
        try:
            return [out async for out in self.engine.generate(prompt, params, str(self.requests))][
                -1
            ]
        finally:
            self.done += 1

    async def stop(self) -> None:
        """End the engine's processes."""
        if self.engine is not None:
            self.engine.shutdown()


def _is_engine(process: psutil.Process) -> bool:
    """Whether it is one of vLLM's own, which name themselves "VLLM::..."."""
    try:
        return "VLLM::" in " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return False


def _not_running(process: psutil.Process) -> str:
    """Why a process does no work: "gone", or the state that the kernel names; "" if it may."""
    try:
        state = process.status()
    except psutil.NoSuchProcess:
        return "gone"
    return (
        state if state in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else ""
    )


def longest_sequence(cfg: Config) -> int:
    """Tokens of the longest prompt with the longest response, of training or of evaluation."""
    return cfg.data.max_prompt_length + max(
        cfg.data.max_response_length, cfg.rollout.val_max_response_length or 0
    )


def engine_args(cfg: Config, device: str, seed: int = 0) -> dict[str, Any]:
    """The fields of vLLM's AsyncEngineArgs for a run; `rollout.engine_kwargs` go on top. `seed`: see `engine_seed`."""
    own, width, longest = cfg.model, cfg.rollout.tensor_parallel_size, longest_sequence(cfg)
    args = dict(
        model=own.path,
        dtype=own.dtype,
        trust_remote_code=own.trust_remote_code,
        max_model_len=longest,
    )
    args |= dict(tensor_parallel_size=width, seed=seed, disable_log_stats=True)
    # Inside a Ray actor vLLM would look for a placement group of its own; its workers are to live in this actor.
    args["distributed_executor_backend"] = "mp" if width > 1 else "uni"
    # Log-probs after temperature: those of the distribution that was sampled from.
    args["logprobs_mode"] = "processed_logprobs"
    args |= dict(weight_transfer_config={"backend": "one_step_off"}, max_num_seqs=256)
    args["worker_extension_cls"] = "one_step_off.weight_sync.vllm_receiver.SyncWorkerExtension"
    if device == "cpu":
        args |= dict(
            enforce_eager=True, block_size=32, kv_cache_memory_bytes=cfg.rollout.kv_cache_mb << 20
        )
        # A seeded request whose prompt is split over two steps kills vLLM's CPU engine: never split one.
        args |= dict(enable_chunked_prefill=False, max_num_batched_tokens=max(8192, longest))
    else:
        args["gpu_memory_utilization"] = cfg.rollout.gpu_memory_utilization
        args["enable_sleep_mode"] = (
            list(cfg.placement.roles.values()).count(cfg.placement.roles["rollout"]) > 1
        )
    return args | cfg.rollout.engine_kwargs
