"""How long responses are in a benchmark: fixed, as the model ends them, or with a long tail.

Fixed ones go on behind the model's end token up to `data.max_response_length`. Long-tailed ones are made by an agent
loop of this module, `benchmarks.common.lengths:LongTail`: each sample has a length of its own, drawn from a log-normal
distribution and cut at `data.max_response_length`, and its engine request asks for exactly so many tokens. The draw
depends on the prompt and on how many samples of it came before, not on the model or on time: all arms of a benchmark do
the same work.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np

from agent_loop.base import AgentLoop, Generate, Limits, ScoreFunction, Trajectory
from one_step_off.config.schema import Config
from one_step_off.data.samples import Prompt

LOOP = "benchmarks.common.lengths:LongTail"
FORMS = "short, fixed:TOKENS or longtail:MOST_TOKENS"
SHARE = 8
"""A long tail's median is this many times shorter than the longest; with sigma 1 two in a hundred are cut there."""


def keys_of(lengths: str) -> tuple[list[str], str]:
    """Keys for one word of `--lengths`, and what it means in words. Raises ValueError: it is none of FORMS."""
    kind, _, number = lengths.partition(":")
    if lengths == "short":
        return [], "as the model ends them, at most data.max_response_length"
    if kind not in ("fixed", "longtail") or not number.isdecimal() or int(number) < 1:
        raise ValueError(f"--lengths {lengths}: must be {FORMS}, as fixed:64")
    most = int(number)
    keys = [f"data.max_response_length={most}", "rollout.sampling_kwargs.ignore_eos=true"]
    if kind == "fixed":
        return keys, f"{most} tokens each"
    if most < 2 * SHARE:
        raise ValueError(f"--lengths {lengths}: a long tail needs {2 * SHARE} tokens or more")
    settings = f"{{'{LOOP}': {{median: {most / SHARE:g}, sigma: 1.0}}}}"
    keys += [f"agent.loop={LOOP}", f"agent.loop_kwargs={settings}"]
    return keys, f"log-normal, median {most / SHARE:g}, sigma 1, cut at {most} tokens"


def draw(
    seed: int, prompt: tuple[int, ...], count: int, median: float, sigma: float, most: int
) -> int:
    """Tokens of the `count`-th sample of a prompt, 1 to `most`."""
    rng = np.random.default_rng([seed, *prompt, count])
    return int(np.clip(round(rng.lognormal(np.log(median), sigma)), 1, most))


class LongTail(AgentLoop):
    """One answer of a drawn length. Needs `rollout.sampling_kwargs={ignore_eos: true}`, else answers may end before."""

    def __init__(
        self, cfg: Config, tokenizer: Any, *, median: float = 16.0, sigma: float = 1.0
    ) -> None:
        super().__init__(cfg, tokenizer)
        if median < 1 or sigma < 0 or not cfg.rollout.sampling_kwargs.get("ignore_eos"):
            raise ValueError(
                "median is 1 or more, sigma 0 or more, and rollout.sampling_kwargs has ignore_eos: true"
            )
        self.median, self.sigma = median, sigma
        self.counts: dict[tuple[int, ...], itertools.count] = defaultdict(itertools.count)

    async def run(
        self, prompt: Prompt, generate: Generate, score: ScoreFunction, limits: Limits
    ) -> Trajectory:
        """See `AgentLoop.run`."""
        count = next(self.counts[prompt.id])
        tokens = draw(
            self.cfg.trainer.seed, prompt.id, count, self.median, self.sigma, limits.tokens
        )
        trajectory = Trajectory(prompt.ids, replace(limits, tokens=tokens))
        await trajectory.generate(generate)
        return trajectory
