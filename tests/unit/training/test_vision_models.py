"""Models that read images, under FSDP: log-probs of the plain model, ranks without images, frozen
parts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from one_step_off.config.errors import ConfigError
from one_step_off.data.samples import Batch, Sample
from one_step_off.data.shapes import picture
from one_step_off.models import tiny_vision
from one_step_off.models.vision import FAMILIES, ImageProcessor, forbidden_tokens
from one_step_off.training.fsdp.fsdp_workers import PolicyWorker
from tests.unit.forked_ranks import run_ranks
from tests.unit.training.fsdp_helpers import config, end, start, whole
from tests.unit.training.rank_helpers import join

TEMPERATURE = 0.7
IMAGES = [picture({"red": 1 + i, "blue": 3 - i}, random.Random(i)) for i in range(3)]
PROMPTS: dict[tuple[int, int], tuple[bytes, ...]] = {
    (0, 0): (IMAGES[0], IMAGES[1]),
    (0, 1): (),
    (0, 2): (IMAGES[2],),
    (0, 3): (),
}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The folder of a small random model that reads images."""
    return tiny_vision.build(str(tmp_path / "model"), kind=request.param)


def batch_of(path: str, prompts: dict[tuple[int, int], tuple[bytes, ...]], n: int = 2) -> Batch:
    """Random responses of different lengths to prompts with and without images."""
    rng = np.random.default_rng(3)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path)
    processor = ImageProcessor(path)
    samples = []
    for prompt, images in prompts.items():
        parts = "".join("<|image_pad|>" * processor.count(image) + " and " for image in images)
        ids = tokenizer.encode(f"Question: {parts}How many?", add_special_tokens=False)
        for index in range(n):
            length = int(rng.integers(3, 7))
            samples.append(
                Sample(
                    prompt_id=prompt,
                    index=index,
                    prompt_ids=np.array(ids, np.int32),
                    response_ids=rng.integers(6, 300, length).astype(np.int32),
                    log_probs=rng.normal(-5, 0.2, length).astype(np.float32),
                    loss_mask=np.ones(length, bool),
                    versions=np.full(length, 3, np.int32),
                )
            )
    batch = Batch(step=4, samples=samples, expected_stamp=(0, 3))
    batch.advantages = [np.full(len(s.response_ids), rng.normal(), np.float32) for s in samples]
    batch.images = {prompt: images for prompt, images in prompts.items() if images}
    return batch


@torch.no_grad()
def plain_log_probs(path: str, sample: Sample, images: tuple[bytes, ...], mask: bool) -> np.ndarray:
    """Of all tokens but the first, by the plain model on one sequence."""
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(path).eval()
    ids = torch.tensor(np.concatenate([sample.prompt_ids, sample.response_ids])).long()[None]
    inputs: dict[str, Any] = {}
    if images:
        inputs = ImageProcessor(path).inputs(images)
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    logits = model(input_ids=ids, use_cache=False, **inputs).logits[0, :-1]
    if mask:
        logits[:, forbidden_tokens(model.config)] = -torch.inf
        logits /= TEMPERATURE
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()


def test_log_probs_are_those_of_the_plain_model(model):
    batch = batch_of(model, PROMPTS)
    worker = start(config(model, actor__micro_batch_tokens=64), cls=PolicyWorker)
    found = worker.log_prob(batch)
    images = [batch.images.get(sample.prompt_id, ()) for sample in batch.samples]
    sequences = [np.concatenate([s.prompt_ids, s.response_ids]) for s in batch.samples]
    scores = worker.score(sequences, images)
    assert len(worker.score(sequences[2:4])) == 2  # without images at all
    end()
    for position, sample in enumerate(batch.samples):
        own = images[position]
        expected = plain_log_probs(model, sample, own, mask=True)[len(sample.prompt_ids) - 1 :]
        np.testing.assert_allclose(found[position], expected, atol=2e-5)
        # What is compared with the engine's log-probs of a prompt has nothing forbidden.
        np.testing.assert_allclose(
            scores[position], plain_log_probs(model, sample, own, mask=False), atol=2e-5
        )


def train(worker: PolicyWorker, path: str) -> None:
    # By tokens one rank gets the long sequence, with images, and the other one those of text.
    prompts = {(0, 0): (*IMAGES, *IMAGES, *IMAGES), (0, 1): (), (0, 3): ()}
    for _ in range(3):
        worker.update(batch_of(path, prompts, n=1))


def train_rank(rank: int, path: str, folder: Path) -> None:
    torch.set_num_threads(1)
    worker = PolicyWorker(config(path, actor__lr=1e-3), "actor", rank, 2, "cpu", 10)
    join(worker, "ranks", folder)
    train(worker, path)
    weights = whole(worker)
    if rank == 0:
        torch.save(weights, folder / "weights.pt")
    end()


def test_a_rank_without_images_learns_beside_one_with_images(model, tmp_path):
    run_ranks(train_rank, (model, tmp_path), 2)
    together = torch.load(tmp_path / "weights.pt", weights_only=False)
    worker = start(config(model, actor__lr=1e-3), cls=PolicyWorker)
    before = whole(worker)
    train(worker, model)
    alone = whole(worker)
    end()
    for name, weights in alone.items():
        # One that learns nothing from the other differs by 3e-3; AdamW turns a gradient near 0
        # by rounding.
        np.testing.assert_allclose(together[name], weights, atol=2e-4, rtol=0, err_msg=name)
    assert any((alone[name] != before[name]).any() for name in alone if "visual" in name)


def test_frozen_parts_are_sent_and_not_trained(model):
    cfg = config(model, actor__lr=1e-3, model__freeze=["visual", "embed_tokens"])
    worker = start(cfg, cls=PolicyWorker)
    before = whole(worker)
    worker.update(batch_of(model, PROMPTS))
    after = whole(worker)
    sent = {piece.name for piece in worker.weight_plan()}
    optimizer: Any = worker.optimizer
    trained = sum(len(group["params"]) for group in optimizer.param_groups)
    end()
    frozen = {name for name in before if "visual" in name or "embed_tokens" in name}
    assert {name for name in before if (before[name] == after[name]).all()} == frozen
    assert trained == len(before) - len(frozen)
    assert any("visual" in name for name in sent)


@pytest.mark.parametrize("freeze", [["vision"], ["model"]])
def test_names_that_freeze_nothing_or_all_are_refused(freeze, tmp_path):
    path = tiny_vision.build(str(tmp_path / "model"))
    with pytest.raises(ConfigError, match=r"^model\.freeze="):
        start(config(path, model__freeze=freeze), cls=PolicyWorker)
    end()
