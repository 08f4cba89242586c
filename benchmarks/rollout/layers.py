"""What our own layers cost per token, from vLLM's answer to the samples of a call: an engine that
answers at once stands in for vLLM.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

from agent_loop.base import Generated
from benchmarks.rollout.end_to_end import InstantScores
from benchmarks.rollout.host import PROMPT_TOKENS, Load
from one_step_off.config.schema import Config
from one_step_off.data.samples import Prompt
from one_step_off.models import tiny_qwen
from one_step_off.rollout.replica import RolloutReplica
from one_step_off.rollout.sampling import Sampling


def make_replica(load: Load) -> RolloutReplica:
    """A replica whose engine has the responses ready."""
    cfg = Config()
    cfg.data.max_response_length = max(load.lengths)
    replica = RolloutReplica(cfg, 0, "cpu", [InstantScores()])
    replica.tokenizer = tiny_qwen.build_tokenizer()
    replica.stamp = (0, 0)
    lengths = iter(load.lengths)
    vocabulary = len(replica.tokenizer)
    generator = np.random.default_rng(0)

    async def generate(*_: Any) -> Generated:
        length = next(lengths)
        ids = generator.integers(5, vocabulary, length, dtype=np.int32)
        return Generated(ids, np.zeros(length, np.float32), np.zeros(length, np.int32), 0, "length")

    replica._generate = generate
    return replica


def measure(load: Load, repeats: int) -> list[float]:
    """Microseconds of CPU time per token, of each repeat."""
    ids = np.arange(5, 5 + PROMPT_TOKENS, dtype=np.int32)
    prompts = [Prompt((0, row), ids, "q", "1") for row in range(len(load.lengths))]
    found = []
    for _ in range(repeats):
        replica = make_replica(load)
        replica.loops.get()  # a run creates the loop once
        begin = time.thread_time()
        samples = asyncio.run(replica.rollout(prompts, Sampling(1, 1.0, None)))
        found.append(1e6 * (time.thread_time() - begin) / sum(load.lengths))
        assert sum(len(sample.response_ids) for sample in samples) == sum(load.lengths)
    return found
