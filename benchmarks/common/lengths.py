"""How long responses are in a benchmark: as the model ends them, fixed, or with a long tail.

Fixed responses continue after the model's end token up to `data.max_response_length`.

Long-tailed responses come from the agent loop of this module, `benchmarks.common.lengths:LongTail`.
Each sample has a length of its own, drawn from a log-normal distribution and cut at
`data.max_response_length`, and its engine request asks for exactly that many tokens. The draw
depends on the prompt and on how many samples of it came before, not on the model or on time. So all
arms of a benchmark do the same work.
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
FORMS = "short, fixed:TOKENS or longtail:MAX_TOKENS"

MAX_OVER_MEDIAN = 8
"""The longest response over the median of a long tail. With sigma 1 two samples in a hundred are
cut.
"""


def keys_of(lengths: str) -> tuple[list[str], str]:
    """Read one value of the flag `--lengths`.

    Returns:
        The config keys, and the lengths in words.

    Raises:
        ValueError: the value is none of FORMS.
    """
    if lengths == "short":
        return [], "as the model ends them, at most data.max_response_length"
    kind, _, number = lengths.partition(":")
    if kind not in ("fixed", "longtail") or not number.isdecimal() or int(number) < 1:
        raise ValueError(f"--lengths {lengths}: must be {FORMS}, as fixed:64")
    longest = int(number)
    keys = [f"data.max_response_length={longest}", "rollout.sampling_kwargs.ignore_eos=true"]
    if kind == "fixed":
        return keys, f"{longest} tokens each"
    shortest_tail = 2 * MAX_OVER_MEDIAN
    if longest < shortest_tail:
        raise ValueError(f"--lengths {lengths}: a long tail needs {shortest_tail} tokens or more")
    median = longest / MAX_OVER_MEDIAN
    keys += [
        f"agent.loop={LOOP}",
        f"agent.loop_kwargs={{'{LOOP}': {{median: {median:g}, sigma: 1.0}}}}",
    ]
    return keys, f"log-normal, median {median:g}, sigma 1, cut at {longest} tokens"


def draw(
    seed: int,
    prompt_id: tuple[int, ...],
    sample_number: int,
    median: float,
    sigma: float,
    longest: int,
) -> int:
    """The length of a sample in tokens, 1 to `longest`; the same for the same arguments."""
    rng = np.random.default_rng([seed, *prompt_id, sample_number])
    length = round(rng.lognormal(np.log(median), sigma))
    return int(np.clip(length, 1, longest))


class LongTail(AgentLoop):
    """One response of a drawn length.

    It needs `rollout.sampling_kwargs={ignore_eos: true}`. Without that key responses may end
    earlier.
    """

    def __init__(
        self, cfg: Config, tokenizer: Any, *, median: float = 16.0, sigma: float = 1.0
    ) -> None:
        super().__init__(cfg, tokenizer)
        ignores_eos = cfg.rollout.sampling_kwargs.get("ignore_eos")
        if median < 1 or sigma < 0 or not ignores_eos:
            raise ValueError(
                "median is 1 or more, sigma 0 or more, "
                "and rollout.sampling_kwargs has ignore_eos: true"
            )
        self.median = median
        self.sigma = sigma
        self.samples_begun: dict[tuple[int, ...], itertools.count] = defaultdict(itertools.count)

    async def run(
        self, prompt: Prompt, generate: Generate, score: ScoreFunction, limits: Limits
    ) -> Trajectory:
        """See `AgentLoop.run`."""
        sample_number = next(self.samples_begun[prompt.id])
        seed = self.cfg.trainer.seed
        tokens = draw(seed, prompt.id, sample_number, self.median, self.sigma, limits.tokens)
        trajectory = Trajectory(prompt.ids, replace(limits, tokens=tokens))
        await trajectory.generate(generate)
        return trajectory
