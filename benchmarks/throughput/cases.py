"""What `benchmarks.throughput` compares: the arms, and the cases that its flags ask for, as keys of configs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common import lengths
from one_step_off.config.schema import Config

COLOCATED, APART = "colocated sync", "disaggregated sync"
PLAIN, AHEAD = "one step off", "one step off, overlapped sync"
ARMS = {"colocated": COLOCATED, "disaggregated": APART, "plain": PLAIN, "overlapped": AHEAD}
"""The words of `--arms`, and the arms' names in tables."""

UNEVALUATED = ["data.val_files=", "trainer.test_freq=-1", "trainer.save_hf_model=false"]

# The shape of SmolLM2-135M. With another vocabulary's tokenizer: its ids are the first of these.
RANDOM = {
    "random:smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
    }
}
"""Models with random weights, of a known one's shape. They never end an answer, except by chance."""


def arms_of(cfg: Config) -> dict[str, list[str]]:
    """Arm -> its keys, over a config whose rollout has a pool of its own. Colocated, all roles are in one pool of as many
    GPUs, or processes on a CPU, as the others have together."""
    most = [sum(node) for node in itertools.zip_longest(*cfg.placement.pools.values(), fillvalue=0)]
    roles = ", ".join(f"{role}: all" for role in cfg.placement.roles)
    colocated = [
        f"placement.pools={{all: {most}}}",
        f"placement.roles={{{roles}}}",
        "pipeline.staleness=0",
    ]
    return {
        COLOCATED: colocated,
        APART: ["pipeline.staleness=0"],
        PLAIN: ["pipeline.staleness=1", "weight_sync.overlap=false"],
        AHEAD: ["pipeline.staleness=1", "weight_sync.overlap=true"],
    }


@dataclass(frozen=True)
class Case:
    """One combination of the flags. An empty text: as the config has it."""

    model: str = ""
    length: str = "short"
    batch: str = ""
    split: str = ""

    @property
    def name(self) -> str:
        """For folders and headings."""
        parts = [self.model.rstrip("/").rpartition("/")[2], self.length, self.batch, self.split]
        return " ".join(part for part in parts if part)

    def keys(self, cfg: Config) -> list[str]:
        """Its keys over `cfg`, all but the model's.

        Raises:
            ValueError: what a flag says has no meaning, in one line.
        """
        return (
            lengths.keys_of(self.length)[0]
            + batch_keys(self.batch, cfg)
            + split_keys(self.split, cfg)
        )


def batch_keys(batch: str, cfg: Config) -> list[str]:
    """`PROMPTS` or `PROMPTSxSAMPLES` of a step; mini-batches become so much larger or smaller. Raises ValueError."""
    if not batch:
        return []
    numbers = batch.split("x")
    if len(numbers) > 2 or not all(n.isdecimal() and int(n) for n in numbers):
        raise ValueError(
            f"--batches {batch}: must be prompts, or prompts x samples of each, as 16 or 16x8"
        )
    prompts, old = int(numbers[0]), cfg.data.train_batch_size
    updates = max(1, old // cfg.actor.ppo_mini_batch_size)
    mini = prompts // math.gcd(updates, prompts)
    keys = [f"data.train_batch_size={prompts}", f"actor.ppo_mini_batch_size={mini}"]
    return keys + [f"rollout.n={n}" for n in numbers[1:]]


def split_keys(split: str, cfg: Config) -> list[str]:
    """`ROLLOUT:TRAINER` processes of the two pools (GPUs, where there are some), on one node. Raises ValueError."""
    if not split:
        return []
    numbers = split.split(":")
    if len(numbers) != 2 or not all(n.isdecimal() and int(n) for n in numbers):
        raise ValueError(f"--splits {split}: must be processes that generate : that train, as 2:1")
    own = cfg.placement.roles
    if "actor" not in own or own["rollout"] == own["actor"]:
        raise ValueError(
            f"--splits {split}: the config has rollout and actor in one pool; give each its own"
        )
    pools = cfg.placement.pools | {
        own["rollout"]: [int(numbers[0])],
        own["actor"]: [int(numbers[1])],
    }
    return [f"placement.pools={{{', '.join(f'{name}: {shape}' for name, shape in pools.items())}}}"]


def cases_of(
    models: Sequence[str], length: Sequence[str], batches: Sequence[str], splits: Sequence[str]
) -> list[Case]:
    """All combinations, in the flags' order."""
    return [
        Case(*one)
        for one in itertools.product(models or [""], length, batches or [""], splits or [""])
    ]


def model_path(model: str) -> str:
    """A directory or hub id for one word of `--models`; a random model is built once, into the cache. Raises ValueError."""
    if not model.startswith("random:"):
        return model
    if model not in RANDOM:
        raise ValueError(
            f"--models {model}: there are {', '.join(RANDOM)}; or a directory, a hub id, tiny:qwen2"
        )
    from one_step_off.models import tiny_qwen

    target = tiny_qwen.cache_dir() / f"benchmark-{model.partition(':')[2]}"
    if not target.is_dir():
        part = target.with_name(f".{target.name}.part")
        part.mkdir(parents=True, exist_ok=True)
        tiny_qwen.build("llama", str(part), initializer_range=0.02, **RANDOM[model])
        part.rename(target)
    return str(target)


def what_model(model: str) -> str:
    """It in words."""
    if model in RANDOM:
        return f"random weights in the shape of {model.partition(':')[2]}, not the pretrained model"
    return model
