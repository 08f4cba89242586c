"""What `benchmarks.throughput` compares: the arms, and the cases that its flags ask for, as config
keys.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common import lengths
from benchmarks.common.models import SMOLLM2_135M
from one_step_off.config.placement import (
    devices_of_run,
    devices_per_node,
    resolved_device,
    shared_devices,
)
from one_step_off.config.schema import Config

COLOCATED = "colocated sync"
DISAGGREGATED = "disaggregated sync"
ONE_STEP_OFF = "one step off"
OVERLAPPED = "one step off, overlapped sync"
AUTO = "one step off, overlap auto"
SHARED = "one step off, shared device"
SPECULATION = "one step off, n-gram speculation"
FP8 = "one step off, FP8 engine"
ARMS = {
    "colocated": COLOCATED,
    "disaggregated": DISAGGREGATED,
    "plain": ONE_STEP_OFF,
    "overlapped": OVERLAPPED,
    "auto": AUTO,
    "shared": SHARED,
    "ngram": SPECULATION,
    "fp8": FP8,
}
"""Values of the flag `--arms` -> names of the arms in tables."""

# With another vocabulary's tokenizer, whose ids are the first of the model's.
RANDOM_MODELS = {"random:smollm2-135m": SMOLLM2_135M}
"""Models with random weights and the shape of a known one. They end a response only by chance."""


def arms_of(cfg: Config) -> dict[str, list[str]]:
    """The config keys of each arm that a config can have, which gives rollout a pool of its own.

    All arms use the same devices. The colocated arm has all roles in one pool. The pool has as many
    GPUs (on a CPU: processes) as the config's pools have together. In the shared arm rollout and
    trainer have half of one device each: the single GPU, or on a CPU all of its cores. The arms of
    speculation and of FP8, which needs model.dtype=bfloat16, are as the one with overlap auto.
    """
    single_device = devices_of_run(cfg) == 1
    roles = ", ".join(f"{role}: all" for role in cfg.placement.roles)
    colocated = {
        COLOCATED: [
            f"placement.pools={{all: {_devices_per_node(cfg)}}}",
            f"placement.roles={{{roles}}}",
            "pipeline.staleness=0",
        ]
    }
    shared = {SHARED: _shared_keys(cfg)}
    if single_device:
        return colocated | shared
    if resolved_device(cfg) == "cuda":
        shared = {}
    auto = ["pipeline.staleness=1", "weight_sync.overlap=auto"]
    return (
        colocated
        | {
            DISAGGREGATED: ["pipeline.staleness=0"],
            ONE_STEP_OFF: ["pipeline.staleness=1", "weight_sync.overlap=false"],
            OVERLAPPED: ["pipeline.staleness=1", "weight_sync.overlap=true"],
            AUTO: auto,
            SPECULATION: [*auto, "rollout.speculation=ngram"],
            FP8: [*auto, "rollout.quantization=fp8_per_channel"],
        }
        | shared
    )


def default_arms(cfg: Config) -> list[str]:
    """The arms that are compared without `--arms`."""
    if devices_of_run(cfg) == 1:
        return [COLOCATED, SHARED]
    return [COLOCATED, DISAGGREGATED, ONE_STEP_OFF, OVERLAPPED]


def _devices_per_node(cfg: Config) -> list[int]:
    """Devices of all pools on each node."""
    if shared_devices(cfg) == devices_of_run(cfg):
        return [1] * shared_devices(cfg)
    pools = [devices_per_node(cfg, pool) for pool in cfg.placement.pools]
    return [sum(node) for node in itertools.zip_longest(*pools, fillvalue=0)]


def _shared_keys(cfg: Config) -> list[str]:
    roles = {role: "rollout" if role == "rollout" else "trainer" for role in cfg.placement.roles}
    shown = ", ".join(f"{role}: {pool}" for role, pool in roles.items())
    return [
        "placement.pools={rollout: [0.5], trainer: [0.5]}",
        f"placement.roles={{{shown}}}",
        "pipeline.staleness=1",
        "weight_sync.overlap=true",
    ]


@dataclass(frozen=True)
class Case:
    """One combination of values of the flags. An empty value means what the config has."""

    model: str = ""
    length: str = "short"
    batch: str = ""
    split: str = ""

    @property
    def name(self) -> str:
        """The case in folder names and headings."""
        model_name = self.model.rstrip("/").rpartition("/")[2]
        parts = [model_name, self.length, self.batch, self.split]
        return " ".join(part for part in parts if part)

    def keys(self, cfg: Config) -> list[str]:
        """The config keys of the case over `cfg`, without the model's.

        Raises:
            ValueError: the value of a flag has no meaning. The message is one line.
        """
        length_keys, _ = lengths.keys_of(self.length)
        return length_keys + batch_keys(self.batch, cfg) + split_keys(self.split, cfg)


def _positive_integers(words: list[str]) -> bool:
    return all(word.isdecimal() and int(word) for word in words)


def batch_keys(batch: str, cfg: Config) -> list[str]:
    """Config keys for one value of `--batches`.

    The number of updates per step stays as in the config where it divides the prompts, so
    mini-batches grow and shrink with the batch.

    Args:
        batch: `PROMPTS` or `PROMPTSxSAMPLES` of a step.
        cfg: the config over which the keys are set.

    Raises:
        ValueError: the value has another form.
    """
    if not batch:
        return []
    numbers = batch.split("x")
    if len(numbers) > 2 or not _positive_integers(numbers):
        raise ValueError(
            f"--batches {batch}: must be prompts, or prompts x samples of each, such as 16 or 16x8"
        )
    prompts = int(numbers[0])
    updates = max(1, cfg.data.train_batch_size // cfg.actor.ppo_mini_batch_size)
    mini_batch = prompts // math.gcd(updates, prompts)
    keys = [f"data.train_batch_size={prompts}", f"actor.ppo_mini_batch_size={mini_batch}"]
    if len(numbers) == 2:
        keys.append(f"rollout.n={numbers[1]}")
    return keys


def split_keys(split: str, cfg: Config) -> list[str]:
    """Config keys for one value of `--splits`.

    Args:
        split: `ROLLOUT:TRAINER` processes of the two pools (GPUs, where there are some), on one
            node.
        cfg: the config over which the keys are set.

    Raises:
        ValueError: the value has another form, or the config has both roles in one pool.
    """
    if not split:
        return []
    numbers = split.split(":")
    if len(numbers) != 2 or not _positive_integers(numbers):
        raise ValueError(
            f"--splits {split}: must be processes that generate : that train, such as 2:1"
        )
    roles = cfg.placement.roles
    if "actor" not in roles or roles["rollout"] == roles["actor"]:
        raise ValueError(
            f"--splits {split}: the config has rollout and actor in one pool; give each its own"
        )
    pools = dict(cfg.placement.pools)
    pools[roles["rollout"]] = [int(numbers[0])]
    pools[roles["actor"]] = [int(numbers[1])]
    shapes = ", ".join(f"{name}: {shape}" for name, shape in pools.items())
    return [f"placement.pools={{{shapes}}}"]


def cases_of(
    models: Sequence[str],
    response_lengths: Sequence[str],
    batches: Sequence[str],
    splits: Sequence[str],
) -> list[Case]:
    """All combinations of the flags' values, in their order."""
    combinations = itertools.product(
        models or [""], response_lengths, batches or [""], splits or [""]
    )
    return [Case(*combination) for combination in combinations]


def model_path(model: str) -> str:
    """The directory or hub id for one value of `--models`. A random model is built once, in the
    cache.

    Raises:
        ValueError: there is no such random model.
    """
    if not model.startswith("random:"):
        return model
    if model not in RANDOM_MODELS:
        raise ValueError(
            f"--models {model}: there are {', '.join(RANDOM_MODELS)}; "
            "or a directory, a hub id, tiny:qwen2"
        )
    from one_step_off.models import tiny_qwen

    target = tiny_qwen.cache_dir() / f"benchmark-{model.partition(':')[2]}"
    if not target.is_dir():
        # Renamed only when complete: a build that was interrupted must not be taken for a model.
        unfinished = target.with_name(f".{target.name}.part")
        unfinished.mkdir(parents=True, exist_ok=True)
        tiny_qwen.build("llama", str(unfinished), initializer_range=0.02, **RANDOM_MODELS[model])
        unfinished.rename(target)
    return str(target)


def model_in_words(model: str) -> str:
    """A model's description, for reports."""
    if model in RANDOM_MODELS:
        return f"random weights in the shape of {model.partition(':')[2]}, not the pretrained model"
    return model
