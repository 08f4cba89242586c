"""Rewards by a model: a classifier in a pool of this run, or a server. Both score the finished samples of a step.

    scores = await reward_model.rewards(batch)      # one float per sample

The reward of a sample is then reward.weight * (score of reward.function) + reward_model.weight * (score of the model).
"""

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from one_step_off.cluster.errors import RoleError
from one_step_off.cluster.remote_calls import OnSpan
from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch, PackedArrays, PromptLookup, Sample
from one_step_off.rewards.scoring import MAX_REWARD, RewardError
from one_step_off.training.trainer_group import TrainGroup, merged


def sequences_for(
    samples: Sequence[Sample], find: PromptLookup, ours: Any, theirs: Any
) -> list[np.ndarray]:
    """Prompt and response as the reward model reads them: int32 token ids, one array per sample. Where both tokenizers
    are the same these are the very tokens of the policy. Else the texts are written anew: through the reward model's
    chat template where it has one and the prompt is a chat, or as plain text."""
    if ours.get_vocab() == theirs.get_vocab():
        return [np.concatenate([s.prompt_ids, s.response_ids]) for s in samples]
    texts = []
    for s in samples:
        prompt = find(s.prompt_id)
        if theirs.chat_template and prompt.messages:
            chat = [*prompt.messages, {"role": "assistant", "content": s.response}]
            texts.append(theirs.apply_chat_template(chat, tokenize=False))
        else:
            texts.append(prompt.text + s.response)
    return [
        np.asarray(x, np.int32)
        for x in theirs(texts, add_special_tokens=not theirs.chat_template)["input_ids"]
    ]


class LocalRewardModel(TrainGroup):
    """The role reward_model: a sequence classifier under the training back end."""

    def __init__(self, *of_group: Any, find: PromptLookup, ours: Any, theirs: Any) -> None:
        """`of_group`: as of `TrainGroup`. `ours`, `theirs`: the tokenizers of the policy and of the reward model."""
        super().__init__(*of_group)
        self.find, self.ours, self.theirs = find, ours, theirs

    async def rewards(self, batch: Batch) -> list[float]:
        """One score per sample. Tokenising happens beside the event loop."""
        sequences = await asyncio.to_thread(
            sequences_for, batch.samples, self.find, self.ours, self.theirs
        )
        return merged(await self._in_turn(batch.step, "score_sequences", PackedArrays(sequences)))


class RemoteRewardModel:
    """A server: POST {"prompts", "responses", "ground_truths"} (lists of texts) -> {"scores": [numbers]}."""

    def __init__(self, cfg: Config, find: PromptLookup) -> None:
        self.own, self.find, self.gate = (
            cfg.reward_model,
            find,
            asyncio.Semaphore(cfg.reward_model.max_concurrency),
        )
        self.on_span: OnSpan = lambda *_: None

    async def rewards(self, batch: Batch) -> list[float]:
        """One score per sample; at most `max_concurrency` requests of `request_size` samples are open at once. NaN, with
        `extra["error"]`, where a request failed `retries` + 1 times, be it for an answer that is no scores."""
        import aiohttp

        begin, size = time.perf_counter(), self.own.request_size
        parts = [batch.samples[i : i + size] for i in range(0, len(batch.samples), size)]
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(self.own.timeout_s)
        ) as session:
            scores = await asyncio.gather(
                *(self._request(session, part, batch.step) for part in parts)
            )
        self.on_span("reward_model", "score_sequences", batch.step, begin, time.perf_counter())
        return [score for part in scores for score in part]

    async def _request(self, session: Any, samples: list[Sample], step: int) -> list[float]:
        prompts = [self.find(s.prompt_id) for s in samples]
        body = {
            "prompts": [p.text for p in prompts],
            "ground_truths": [p.ground_truth for p in prompts],
        }
        body["responses"] = [s.response for s in samples]
        for attempt in range(self.own.retries + 1):
            if attempt:
                await asyncio.sleep(min(0.5 * 2 ** (attempt - 1), 10.0))
            try:
                async with self.gate, session.post(self.own.url, json=body) as answer:
                    answer.raise_for_status()
                    scores = (await answer.json())["scores"]
                if len(scores) == len(samples) and all(
                    type(x) in (int, float) and math.isfinite(x) for x in scores
                ):
                    return [float(x) for x in scores]
                problem = f"{len(samples)} finite scores were wanted, and {str(scores)[:80]} came"
            except (
                Exception
            ) as e:  # the network's, the server's and the parser's: all are tried again
                problem = f"{type(e).__name__}: {str(e) or 'no answer in time'}"
        why = RewardError(
            f"step {step}, reward_model.url={self.own.url}: {attempt + 1} requests failed: {problem}"
        )
        for sample in samples:
            sample.extra.setdefault("error", str(why))
        return [math.nan] * len(samples)


def mix(samples: Sequence[Sample], scores: Sequence[float], cfg: Config) -> None:
    """Add the model's scores to the rewards, and as "model" to `reward_parts`, beside "function" or the function's own.
    Raises RoleError: a score is not finite, or too large, and `reward.on_error=stop`; otherwise it counts as 0, and is an error."""
    for sample, score in zip(samples, scores, strict=True):
        if not abs(score) <= MAX_REWARD:
            what = f"reward_model: the score of prompt {sample.prompt_id}, sample {sample.index} is {score}, no number up to {MAX_REWARD:g}"
            if cfg.reward.on_error == "stop":
                raise RoleError(sample.extra.get("error", what))
            sample.extra, score = {"error": what, "fault": "reward/errors"} | sample.extra, 0.0
        parts = sample.extra.get("reward_parts", {"function": sample.reward})
        if "model" in parts:
            raise RoleError(
                "reward_model: reward.function has a part named model too; give it another name"
            )
        sample.extra["reward_parts"] = parts | {"model": score}
        sample.reward = cfg.reward.weight * sample.reward + cfg.reward_model.weight * score
