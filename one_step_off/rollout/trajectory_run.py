"""One trajectory on a replica: its agent loop, with the engine and the reward function bound to it,
as a scored sample."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from agent_loop.base import CURRENT_PROMPT, Generated, Loops, Trajectory
from agent_loop.episode import Episode, RewardMissing, data_kind
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.config.sections.data import reward_names, source_of
from one_step_off.config.user_code import (
    MAX_MESSAGE_CHARS,
    describe_error,
    format_traceback,
    log_traceback,
    quote_response,
)
from one_step_off.data.samples import AGENT_ERROR, TIME_PARTS, Prompt, Sample, make_plain
from one_step_off.rewards.reward import Reward, RewardError, RewardItem, Score
from one_step_off.rewards.verifiers import REWARD_FUNCTIONS
from one_step_off.rollout.concurrency import ConcurrencyLimiter, TrajectorySlot
from one_step_off.rollout.reward_queue import RewardQueue
from one_step_off.rollout.sampling import Sampling, sample_seed


class Replica(Protocol):
    """The part of `RolloutReplica` that a trajectory uses."""

    cfg: Config
    tokenizer: Any
    attempt: int
    limiter: ConcurrencyLimiter
    rewards: RewardQueue
    _generate: Callable[..., Awaitable[Generated]]

    @property
    def loops(self) -> Loops:
        """The agent loops, by name."""
        ...


def missing_rewards(
    prompts: Sequence[Prompt], trajectories: Sequence[list[Sample]]
) -> dict[int, RewardMissing]:
    """Which episodes of external agents have no reward of their agent, where another one of the
    same kind has: position -> the error. They were scored by the run's reward function, because
    they ended before that one.

    Args:
        prompts: of each trajectory.
    """
    rewarded = set()
    missing = {}
    for position, (prompt, samples) in enumerate(zip(prompts, trajectories, strict=True)):
        own_reward = samples[0].extra.get("agent", {}).get("own_reward")
        if own_reward:
            rewarded.add(data_kind(prompt))
        elif own_reward is not None:
            missing[position] = RewardMissing(samples[0].extra.get("agent_failure", ""))
    return {i: error for i, error in missing.items() if data_kind(prompts[i]) in rewarded}


class TrajectoryRun:
    """Makes sample `index` of a prompt."""

    def __init__(self, replica: Replica, prompt: Prompt, index: int, sampling: Sampling) -> None:
        self.replica = replica
        self.cfg = replica.cfg
        self.prompt = prompt
        self.index = index
        self.seed = sampling.seed
        source = source_of(self.cfg.data, prompt.source)
        longest = source.max_response_length or self.cfg.data.max_response_length
        self.most_tokens = sampling.max_tokens or longest
        self.is_greedy = index == sampling.n
        is_held_out = prompt.id[0] < 0
        self.is_trained = not (self.is_greedy or is_held_out)
        self.sampling = replace(sampling, temperature=0.0) if self.is_greedy else sampling
        timeout_s = source.timeout_s or self.cfg.agent.timeout_s
        limit_s = 2 * (timeout_s + self.cfg.agent.tool_timeout_s)
        self.slot = TrajectorySlot(replica.limiter, limit_s)
        self.begin_s = time.monotonic()
        self.seconds = dict.fromkeys(TIME_PARTS, 0.0)
        self.next_turn = 0
        self.turns: list[Generated] = []
        self.reward_fault: dict[str, str] = {}  # of the last reward; see `_fault_of`
        # The first error: what followed in the conversation built on a reward that was none.
        self.reward_error: dict[str, str] = {}

    async def samples(self) -> list[Sample]:
        """The scored sample, or those of an episode's segments; one without tokens if the agent
        loop failed.

        Raises:
            RewardError: with reward.on_error=stop, a failure of the reward function or of the agent
                loop.
            ConfigError: the agent loop does not fit the config.
            Exception: whatever the engine raised, whatever the loop made of it.
        """
        outcome = await self.slot.run(self._run_loop)
        if self.slot.call_errors:
            raise self.slot.call_errors[0]
        if isinstance(outcome, ConfigError):
            raise outcome
        samples = outcome if isinstance(outcome, list) else [self.failed_sample(outcome)]
        samples[0].seconds = self._all_seconds()
        return samples

    def _all_seconds(self) -> dict[str, float]:
        """`Sample.seconds`: what is neither of engine nor of reward function is the loop's own."""
        seconds = self.seconds | {"queue": self.seconds["queue"] + self.slot.queue_s}
        whole = time.monotonic() - self.begin_s
        return seconds | {"tool": max(0.0, whole - sum(seconds.values()))}

    async def _run_loop(self) -> list[Sample]:
        loops = self.replica.loops
        loop = loops.get(self.prompt.agent_loop)
        limits = loops.limits(self.most_tokens, self.prompt.source)
        CURRENT_PROMPT.set(self.prompt)
        trajectory = await loop.run(self.prompt, self._generate, self._score, limits)
        samples = trajectory.samples(self.prompt, self.index)
        for sample in samples:
            sample.response = self._text(sample.response_ids)
        reward = await self._reward_of(trajectory, samples)
        fault = self.reward_error or self.reward_fault
        if not fault and trajectory.late:
            fault = self._fault_of(None)
        if self.reward_error:
            reward = None
        for sample in samples:
            sample.reward = 0.0 if reward is None else reward.total
            if reward is not None and reward.parts:
                sample.extra["reward_parts"] = reward.parts
            if self.is_greedy:
                sample.extra["greedy"] = True
            sample.extra |= fault
            if not self.is_trained:  # experts are many bytes, for trainers alone
                sample.prompt_experts = sample.response_experts = None
            make_plain(sample)
        samples[0].extra |= self._draft_tokens()  # those of all turns, once
        return samples

    def _draft_tokens(self) -> dict[str, list[int]]:
        """The draft tokens of this trajectory, for the `extra` of a sample; {} where it
        has counted no turn."""
        counts = []
        for turn in self.turns:
            if turn.draft_tokens is not None:
                counts.append((*turn.draft_tokens, len(turn.ids)))
        if not counts:
            return {}
        return {"draft_tokens": [sum(column) for column in zip(*counts, strict=True)]}

    async def _reward_of(
        self, trajectory: Trajectory | Episode, samples: list[Sample]
    ) -> Reward | None:
        """The loop's own reward, or that of the run's reward function for the policy's last turn.

        Raises:
            ValueError: the loop's reward is no finite number.
        """
        if trajectory.reward is None:
            if trajectory.is_single_turn:
                return await self._score(samples[0].response)
            return await self._score(self._text(trajectory.last_turn.ids))
        reward = Reward.of(trajectory.reward)
        if reward is None:
            raise ValueError(f"its reward is {trajectory.reward!r:.200}")
        return reward

    async def _generate(
        self, ids: np.ndarray, max_tokens: int, stop: tuple[str, ...] = ()
    ) -> Generated:
        """The `generate` that the agent loop receives."""
        turn = self.next_turn
        self.next_turn += 1
        seed = None
        if self.seed is not None:
            seed = sample_seed(self.seed, self.prompt.id, self.index, turn)
        sampling = replace(self.sampling, stop=stop) if stop else self.sampling
        async with self.slot.call(uses_engine=True):
            request: tuple[Any, ...] = (ids, max_tokens, seed, sampling)
            if self.prompt.images:
                request = (*request, self.prompt.images)
            begin = time.monotonic()
            generated = await self.replica._generate(*request)
            self._count_turn(generated, time.monotonic() - begin)
            self.turns.append(generated)
            return generated

    def _count_turn(self, generated: Generated, engine_s: float) -> None:
        """Note where the time of a request went, `engine_s` in all."""
        waited_s = generated.queue_s + generated.prefill_s
        self.seconds["queue"] += generated.queue_s
        self.seconds["prefill"] += generated.prefill_s
        self.seconds["decode"] += max(0.0, engine_s - waited_s)

    async def _score(self, response: str) -> Reward | None:
        """The `score` that the agent loop receives."""
        async with self.slot.call(uses_engine=False):
            begin = time.monotonic()
            score = await self.replica.rewards.score(self._reward_item(response))
            self.seconds["reward"] += time.monotonic() - begin
            fault = self._fault_of(score)
        if isinstance(score, RewardError):
            self.reward_error = self.reward_error or fault
        self.reward_fault = fault
        return None if fault else Reward.of(score)

    def _text(self, ids: np.ndarray) -> str:
        return self.replica.tokenizer.decode(ids, skip_special_tokens=True)

    def _reward_item(self, response: str) -> RewardItem:
        """What the reward worker receives."""
        # The row's other columns may be large, so they do not travel where only built-in functions
        # are used.
        has_user_function = any(
            name not in REWARD_FUNCTIONS for name in reward_names(self.cfg.data, self.cfg.reward)
        )
        return RewardItem(
            self.prompt.id,
            self.index,
            self.prompt.text,
            response,
            self.prompt.ground_truth,
            self.prompt.data_source,
            extra_info=self.prompt.extra if has_user_function else {},
            where=self.prompt.where,
            source=self.prompt.source,
        )

    def _fault_of(self, score: Score | RewardError) -> dict[str, str]:
        """What is wrong with a reward, for the sample's `extra`; {} if nothing is.

        Raises:
            RewardError: it is one, and reward.on_error=stop.
        """
        if isinstance(score, RewardError):
            if self.cfg.reward.on_error == "stop":
                raise score
            return {"fault": score.kind, "error": str(score)}
        if score is None:
            return {"fault": "reward/timeouts", "error": "not scored within reward.timeout_s"}
        return {}

    def failed_sample(self, error: BaseException) -> Sample:
        """A sample without tokens, for an agent loop that ended with `error`.

        Raises:
            RewardError: with reward.on_error=stop.
        """
        name = self.prompt.agent_loop or self.cfg.agent.loop
        where = f"agent loop {name}, {self._reward_item('')}"
        message = f"{where}: raised {describe_error(error)}: {str(error):.{MAX_MESSAGE_CHARS}}"
        if self.turns:
            message += f"; {quote_response(self._text(self.turns[0].ids))}"
        details = format_traceback(error)
        log_traceback(message, details)
        extra: dict[str, Any] = {"greedy": True} if self.is_greedy else {}
        extra |= self._fault_of(RewardError(message, AGENT_ERROR, details))
        return Sample(
            self.prompt.id,
            self.index,
            self.prompt.ids,
            response_ids=np.zeros(0, np.int32),
            log_probs=np.zeros(0, np.float32),
            loss_mask=np.zeros(0, bool),
            versions=np.zeros(0, np.int32),
            attempt=self.replica.attempt,
            reward=0.0,
            finish_reason="error",
            extra=extra,
        )
