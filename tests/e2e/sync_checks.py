"""Weight sync without the loop: the processes of a run, and the answers of its engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from one_step_off.cluster.run_events import RunEvents
from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch, Prompt, Sample
from one_step_off.ray_trainer import RunGroups
from one_step_off.rollout.sampling import Sampling
from tests.conftest import tiny_config

PROMPT_COUNT = 6
NEW_TOKENS = 16
UPDATE_SAMPLES = 16
UPDATE_TOKENS = 12
GREEDY = Sampling(1, 0.0, None)


@dataclass
class Answer:
    """A greedy response.

    Attributes:
        token_ids: [NEW_TOKENS].
        log_probs: [NEW_TOKENS], float32, of these tokens.
    """

    token_ids: list[int]
    log_probs: np.ndarray


def make_prompts() -> list[Prompt]:
    """Prompts longer than two blocks of the KV cache (32 tokens): an engine that kept blocks of
    older weights would find them again."""
    prompts = []
    for index in range(PROMPT_COUNT):
        ids = np.arange(5 + index, 85 + 3 * index, dtype=np.int32)
        prompts.append(Prompt((0, index), ids, "", "1"))
    return prompts


def batch_for_update() -> Batch:
    """Random tokens with random advantages: enough to move every weight."""
    generator = np.random.default_rng(0)
    samples = []
    for index in range(UPDATE_SAMPLES):
        sample = Sample(
            (0, index // 4),
            index % 4,
            np.arange(8, dtype=np.int32),
            generator.integers(0, 300, UPDATE_TOKENS).astype(np.int32),
            np.full(UPDATE_TOKENS, -5.9, np.float32),
            np.ones(UPDATE_TOKENS, bool),
            np.zeros(UPDATE_TOKENS, np.int32),
        )
        samples.append(sample)
    batch = Batch(0, samples, expected_stamp=(0, 0))
    batch.advantages = [
        generator.normal(size=UPDATE_TOKENS).astype(np.float32) for _ in range(UPDATE_SAMPLES)
    ]
    return batch


def ignore_message(line: str) -> None:
    """Take a message of the run, and do nothing."""


def run_with_ray(cfg: Config, check: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Start Ray for this config, run the check, and end Ray."""
    import ray

    from one_step_off.runtime import launch

    launch.start_ray(cfg)
    try:
        asyncio.run(check())
    finally:
        ray.shutdown()


async def start_roles(cfg: Config, events: RunEvents | None = None) -> RunGroups:
    """Start the processes of a run, and connect its weight sync. Nothing is synced yet.

    Args:
        cfg: the run's config.
        events: receives what happens.
    """
    from one_step_off.runtime import launch
    from one_step_off.runtime.processes import RunProcesses

    prepared = launch.prepare(cfg, ignore_message)
    roles = RunProcesses(prepared, events=events).roles
    await asyncio.gather(roles.actor.setup(), roles.rollout.setup())
    await roles.sync.connect()
    return roles


def check_syncs_to_another_model(
    engine_model: str,
    trainer_model: str,
    folder: Path,
    changes: dict[str, Any],
    trained_name: str = "",
    engine_changes: dict[str, Any] | None = None,
) -> list[dict[str, float]]:
    """Sync, update, and sync again: after each sync the engine answers as transformers does.
    Returns the metrics of both syncs.

    Args:
        engine_model: the path of the weights that the engine starts with.
        trainer_model: the path of the weights that the trainer starts with.
        folder: the run's folder.
        changes: values by dotted key.
        trained_name: what stands in the names of the weights that an update moves.
        engine_changes: of rollout.engine_kwargs.
    """
    engine_kwargs = {"model": engine_model, "tokenizer": trainer_model, "max_model_len": 160}
    engine_kwargs |= engine_changes or {}
    settings = {
        "rollout.engine_kwargs": engine_kwargs,
        "rollout.sampling_kwargs": {"ignore_eos": True},
    }
    settings.update(changes)
    cfg = tiny_config(trainer_model, str(folder), **settings)
    updated_model = str(folder / "after")
    metrics: list[dict[str, float]] = []

    async def check() -> None:
        roles = await start_roles(cfg)
        metrics.append(await roles.sync((0, 0)))
        assert metrics[0]["canary/logprob_diff_max"] < 1e-4
        await assert_engines_equal_transformers(roles, trainer_model)
        await roles.actor.update(batch_for_update())
        metrics.append(await roles.sync((0, 1)))
        await roles.actor.save_hf(updated_model)
        await assert_engines_equal_transformers(roles, updated_model)
        assert only_trained_weights_moved(trainer_model, updated_model, trained_name), (
            "the update changed nothing, so the second comparison proves nothing"
        )
        await roles.rollout.stop()

    run_with_ray(cfg, check)
    return metrics


async def assert_engines_equal_transformers(roles: RunGroups, model: str) -> None:
    """Every replica answers as the model at this path does by transformers."""
    prompts = make_prompts()
    replica_count = len(roles.rollout.replicas)
    prompts_for_all = []
    for prompt in prompts:
        for replica_index in range(replica_count):  # so each prompt goes to each of them
            prompt_id = (replica_index, prompt.id[1])
            prompts_for_all.append(Prompt(prompt_id, prompt.ids, prompt.text, prompt.ground_truth))
    samples, _ = await roles.rollout.generate(prompts_for_all, "test", GREEDY)
    expected = transformers_answers(model, [prompt.ids for prompt in prompts])
    differences = []
    for sample in samples:
        answer = expected[sample.prompt_id[1]]
        assert sample.response_ids.tolist() == answer.token_ids, "greedy tokens differ from HF's"
        # At temperature 0 vLLM reports the log-probs of the unscaled logits.
        differences.append(np.abs(sample.log_probs - answer.log_probs))
    assert len(samples) == PROMPT_COUNT * replica_count
    assert np.concatenate(differences).mean() <= 1e-5
    assert np.concatenate(differences).max() <= 1e-4


def transformers_answers(model_path: str, prompts: list[np.ndarray]) -> list[Answer]:
    """Greedy answers by transformers, without a KV cache: the plainest reference there is.

    Args:
        model_path: the folder of the model.
        prompts: token ids, [prompt length] each.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    with torch.no_grad():
        return [transformers_answer(model, prompt) for prompt in prompts]


def transformers_answer(model: Any, prompt: np.ndarray) -> Answer:
    """The greedy answer to one prompt, whose token ids have the shape [prompt length]."""
    tokens = torch.from_numpy(prompt.astype(np.int64))[None]
    for _ in range(NEW_TOKENS):
        next_token = model(tokens).logits[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, next_token], dim=1)
    logits = model(tokens).logits.float()
    new_log_probs = logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
    new_tokens = tokens[0, len(prompt) :]
    token_log_probs = new_log_probs.gather(1, new_tokens[:, None])[:, 0]
    return Answer(new_tokens.tolist(), token_log_probs.numpy())


def only_trained_weights_moved(before: str, after: str, trained_name: str) -> bool:
    """Whether most elements of each trained weight moved, and no element of the others.

    Args:
        before: the folder of a model.
        after: the folder of the model after an update.
        trained_name: what stands in the names of the trained weights.
    """
    from safetensors.torch import load_file

    weights_before = load_file(Path(before) / "model.safetensors")
    weights_after = load_file(Path(after) / "model.safetensors")
    for name, tensor in weights_before.items():
        if trained_name in name:
            moved_share = (tensor != weights_after[name]).float().mean()
            if moved_share <= 0.5:
                return False
        elif not torch.equal(tensor, weights_after[name]):
            return False
    return True
