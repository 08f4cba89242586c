"""Rewards by a model: a classifier in a pool of this run, or a server. Both score the finished
samples of a step.

    scores = await reward_model.rewards(batch)      # one float per sample

The reward of a sample is then reward.weight * (score of reward.function) + reward_model.weight *
(score of the model).
"""

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from one_step_off.cluster.errors import RoleError
from one_step_off.cluster.run_events import RunEvents
from one_step_off.config.schema import Config
from one_step_off.data.messages import render_chat
from one_step_off.data.packing import PackedArrays
from one_step_off.data.samples import Batch, PromptLookup, Sample
from one_step_off.rewards.reward import MAX_REWARD, RewardError
from one_step_off.training.trainer_group import WorkerGroup, merged

MAX_BACKOFF_S = 10.0


def sequences_for(
    samples: Sequence[Sample],
    find_prompt: PromptLookup,
    policy_tokenizer: Any,
    reward_tokenizer: Any,
) -> list[np.ndarray]:
    """Prompt and response as the reward model reads them: int32 token ids [L], one array per
    sample.

    Where both tokenizers have the same vocabulary these are the very tokens of the policy. Else the
    texts are tokenized again: through the reward model's chat template where it has one and the
    prompt is a chat, or as plain text.
    """
    if policy_tokenizer.get_vocab() == reward_tokenizer.get_vocab():
        return [np.concatenate([s.prompt_ids, s.response_ids]) for s in samples]
    texts = []
    for sample in samples:
        prompt = find_prompt(sample.prompt_id)
        if reward_tokenizer.chat_template and prompt.messages:
            chat = [*prompt.messages, {"role": "assistant", "content": sample.response}]
            settings = prompt.chat_template_kwargs
            texts.append(render_chat(reward_tokenizer, chat, prompt.tools, settings))
        else:
            texts.append(prompt.text + sample.response)
    # A chat template has written the special tokens already.
    add_special_tokens = not reward_tokenizer.chat_template
    encoded = reward_tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]
    return [np.asarray(ids, np.int32) for ids in encoded]


class LocalRewardModel(WorkerGroup):
    """The role reward_model: a sequence classifier under the training back end."""

    def __init__(
        self,
        *group_args: Any,
        find_prompt: PromptLookup,
        policy_tokenizer: Any,
        reward_tokenizer: Any,
    ) -> None:
        """`group_args`: as of `WorkerGroup`."""
        super().__init__(*group_args)
        self.find_prompt = find_prompt
        self.policy_tokenizer = policy_tokenizer
        self.reward_tokenizer = reward_tokenizer

    async def rewards(self, batch: Batch) -> list[float]:
        """One score per sample. Tokenizing happens beside the event loop."""
        sequences = await asyncio.to_thread(
            sequences_for,
            batch.samples,
            self.find_prompt,
            self.policy_tokenizer,
            self.reward_tokenizer,
        )
        arguments = [PackedArrays(sequences)] * len(self.ranks)
        shares = await self._on_devices(batch.step, "score_sequences", arguments)
        return merged(shares)


class RemoteRewardModel:
    """A server: POST {"prompts", "responses", "ground_truths"} (lists of texts) -> {"scores":
    [numbers]}."""

    def __init__(
        self, cfg: Config, find_prompt: PromptLookup, events: RunEvents | None = None
    ) -> None:
        """`events`: receives the span of each step's requests."""
        self.config = cfg.reward_model
        self.find_prompt = find_prompt
        self.events = events or RunEvents()
        self._open_requests = asyncio.Semaphore(cfg.reward_model.max_concurrency)

    async def rewards(self, batch: Batch) -> list[float]:
        """One score per sample; at most `max_concurrency` requests of `request_size` samples are
        open at once.

        NaN, with `extra["error"]`, where a request failed `retries` + 1 times; an answer that is no
        scores is a failure.
        """
        import aiohttp

        begin = time.perf_counter()
        size = self.config.request_size
        requests = [batch.samples[i : i + size] for i in range(0, len(batch.samples), size)]
        time_limit = aiohttp.ClientTimeout(self.config.timeout_s)
        async with aiohttp.ClientSession(timeout=time_limit) as session:
            answers = await asyncio.gather(
                *(self._request(session, samples, batch.step) for samples in requests)
            )
        self.events.span("reward_model", "score_sequences", batch.step, begin, time.perf_counter())
        return [score for scores in answers for score in scores]

    async def _request(self, session: Any, samples: list[Sample], step: int) -> list[float]:
        """The scores of one request's samples, or NaN for each after the last attempt."""
        prompts = [self.find_prompt(s.prompt_id) for s in samples]
        body = {
            "prompts": [prompt.text for prompt in prompts],
            "ground_truths": [prompt.ground_truth for prompt in prompts],
            "responses": [s.response for s in samples],
        }
        attempts = self.config.retries + 1
        problem = ""
        for attempt in range(attempts):
            if attempt > 0:
                await asyncio.sleep(min(0.5 * 2 ** (attempt - 1), MAX_BACKOFF_S))
            try:
                async with self._open_requests, session.post(self.config.url, json=body) as answer:
                    answer.raise_for_status()
                    scores = (await answer.json())["scores"]
                if _are_scores(scores, len(samples)):
                    return [float(score) for score in scores]
                problem = f"{len(samples)} finite scores were expected, but {str(scores)[:80]} came"
            # The network, the server and the parser may raise anything; all of it is tried again.
            except Exception as e:
                problem = f"{type(e).__name__}: {str(e) or 'no answer in time'}"
        error = RewardError(
            f"step {step}, reward_model.url={self.config.url}: "
            f"{attempts} requests failed: {problem}"
        )
        for sample in samples:
            sample.extra.setdefault("error", str(error))
        return [math.nan] * len(samples)


def _are_scores(scores: Any, count: int) -> bool:
    if len(scores) != count:
        return False
    return all(type(score) in (int, float) and math.isfinite(score) for score in scores)


def mix(samples: Sequence[Sample], scores: Sequence[float], cfg: Config) -> None:
    """Add the model's scores to the rewards, and as "model" to `reward_parts`, beside "function" or
    the function's own.

    A score that is not finite, or too large, counts as 0 and marks its sample with an error.

    Raises:
        RoleError: a score is not finite or too large, and `reward.on_error=stop`; or an episode has
            several samples, of which a model of one response can score none for all.
    """
    for sample in samples:
        if "segment" in sample.extra:
            raise RoleError(
                f"reward_model: prompt {sample.prompt_id}, sample {sample.index}: its episode has "
                f"{sample.extra['segment']['count']} samples, and a reward model scores one "
                "response; remove the reward model, and score the episode with reward.function"
            )
    for sample, score in zip(samples, scores, strict=True):
        if not abs(score) <= MAX_REWARD:  # so written for NaN
            _note_bad_score(sample, score, stops=cfg.reward.on_error == "stop")
            score = 0.0
        parts = sample.extra.get("reward_parts", {"function": sample.reward})
        if "model" in parts:
            raise RoleError(
                "reward_model: reward.function has a part named model too; give it another name"
            )
        sample.extra["reward_parts"] = parts | {"model": score}
        sample.reward = cfg.reward.weight * sample.reward + cfg.reward_model.weight * score


def _note_bad_score(sample: Sample, score: float, stops: bool) -> None:
    where = f"the score of prompt {sample.prompt_id}, sample {sample.index}"
    error = f"reward_model: {where} is {score}, no number up to {MAX_REWARD:g}"
    if stops:
        raise RoleError(sample.extra.get("error", error))
    # The first cause stays.
    sample.extra = {"error": error, "fault": "reward/errors"} | sample.extra
