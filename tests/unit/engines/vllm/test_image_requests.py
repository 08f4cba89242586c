"""Requests with images to vLLM: the prompt, the tokens that it may not sample, what a sync clears,
and what is refused."""

from __future__ import annotations

import asyncio
import inspect
import random
import types
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.data.images import open_image
from one_step_off.data.shapes import picture
from one_step_off.engines.engine import GenerationRequest
from one_step_off.engines.vllm import checks
from one_step_off.engines.vllm.engine import VllmEngine, forbid_tokens, prompt_with_images
from one_step_off.models import tiny_vision
from one_step_off.models.model_checks import check_models

IMAGE = 9
PICTURES = [picture({"red": 1}, random.Random(0)), picture({"blue": 1}, random.Random(1))]


def test_each_image_has_one_token_in_the_engines_prompt():
    ids = np.array([1, IMAGE, IMAGE, IMAGE, 2, IMAGE, 3], np.int32)
    prompt = prompt_with_images(ids, tuple(PICTURES), IMAGE)
    assert prompt["prompt_token_ids"] == [1, IMAGE, 2, IMAGE, 3]
    pixels = [np.asarray(image) for image in prompt["multi_modal_data"]["image"]]
    for found, image in zip(pixels, PICTURES, strict=True):
        assert (found == np.asarray(open_image(image))).all()


def test_tokens_of_images_are_forbidden_beside_the_users_own_bias():
    params = SamplingParams(logit_bias={5: 1.0})
    forbid_tokens(params, [7, IMAGE])
    assert params.logit_bias == {5: 1.0, 7: -100.0, IMAGE: -100.0}


class RunningEngine(VllmEngine):
    """With an `AsyncLLM` that expands each image to three tokens, and notes what is cleared."""

    def __init__(self, tokens_per_image: int) -> None:
        super().__init__(Config(), "cpu")
        self.vision = types.SimpleNamespace(image_token_id=IMAGE, video_token_id=8)
        self.cleared: list[str] = []
        self.tokens_per_image = tokens_per_image
        clear = self.note("pixels")
        self.llm = types.SimpleNamespace(
            generate=self.answer,
            renderer=types.SimpleNamespace(clear_mm_cache_async=clear),
            engine_core=types.SimpleNamespace(pause_scheduler_async=self.note("engine")),
        )

    def note(self, name: str) -> Any:
        async def call(**arguments: Any) -> None:
            self.cleared.append(name)

        return call

    async def answer(self, prompt: dict, params: SamplingParams, *args: Any, **kwargs: Any) -> Any:
        self.params = params
        ids: list[int] = []
        for token in prompt["prompt_token_ids"]:
            ids += [token] * (self.tokens_per_image if token == IMAGE else 1)
        completion = types.SimpleNamespace(
            token_ids=[4],
            weight_versions=[types.SimpleNamespace(version="0.1", start=0, end=1)],
            spec_decode_metrics=None,
            logprobs=types.SimpleNamespace(logprobs=[-1.0]),
            finish_reason="stop",
        )
        yield types.SimpleNamespace(
            prompt_token_ids=ids, outputs=[completion], kv_transfer_params=None
        )


def request(images: tuple[bytes, ...]) -> GenerationRequest:
    ids = np.array([1, *[IMAGE] * 3 * len(images), 2], np.int32)
    return GenerationRequest(ids, 4, 1.0, images=images)


def test_an_engine_that_reads_other_tokens_is_noticed():
    engine = RunningEngine(tokens_per_image=3)
    asyncio.run(engine.generate(request((PICTURES[0],))))
    assert set(engine.params.logit_bias or ()) == {8, IMAGE}
    asyncio.run(engine.generate(request(())))
    with pytest.raises(RuntimeError, match="read 6 tokens .* that has 5"):
        asyncio.run(RunningEngine(tokens_per_image=4).generate(request((PICTURES[0],))))


def test_a_pause_clears_the_pixels_that_the_engine_forgets():
    """The engine clears its half of the cache of pixels, and would miss what this half sends no
    more."""
    engine = RunningEngine(3)
    asyncio.run(engine.pause(wait=True, clear_cache=True))
    assert engine.cleared == ["pixels", "engine"]


def test_vllm_clears_both_halves_and_the_embeddings():
    from vllm.renderers.base import BaseRenderer
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore

    assert "clear_mm_cache_async" in inspect.getsource(AsyncLLM.pause_generation)
    assert inspect.iscoroutinefunction(BaseRenderer.clear_mm_cache_async)
    cleared = inspect.getsource(EngineCore._reset_caches)
    assert "self.reset_mm_cache()" in cleared
    assert "self.reset_encoder_cache()" in cleared
    assert "_reset_caches()" in inspect.getsource(EngineCore._finish_pause)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_vision.build(str(tmp_path_factory.mktemp("images") / "model"))


@pytest.mark.parametrize(
    ("section", "key", "value", "named"),
    [
        ("actor", "backend", "megatron", "actor.backend"),
        ("rollout", "engine", "transformers", "rollout.engine"),
        ("model", "lora_rank", 4, "model.lora_rank"),
        ("actor", "packing", "on", "actor.packing"),
        ("weight_sync", "in_flight", "recompute", "weight_sync.in_flight"),
        ("weight_sync", "in_flight", "keep", "weight_sync.in_flight"),
        ("rollout", "engine_kwargs", {"mm_processor_kwargs": {}}, "rollout.engine_kwargs"),
    ],
)
def test_what_cannot_work_with_images_is_named(model, section, key, value, named):
    cfg = Config()
    cfg.model.path = model
    setattr(getattr(cfg, section), key, value)
    with pytest.raises(ConfigError, match=rf"^{named}=.*reads images"):
        check_models(cfg, 128)


@pytest.mark.parametrize("role", ["critic", "reward_model", "teacher"])
def test_roles_without_eyes_are_named(model, role):
    cfg = Config()
    cfg.model.path = model
    cfg.placement.roles[role] = "actor"
    with pytest.raises(ConfigError, match=rf"^placement.roles.{role}=actor: .* reads images"):
        check_models(cfg, 128)


def test_speculation_is_refused(model):
    cfg = Config()
    cfg.model.path = model
    cfg.rollout.speculation = "ngram"
    with pytest.raises(ConfigError, match="vLLM forbids no tokens where it speculates"):
        checks.check_policy(cfg)


def test_a_venv_without_torchvision_is_named(model, monkeypatch):
    monkeypatch.setattr(checks, "is_installed", lambda package: package != "torchvision")
    cfg = Config()
    cfg.model.path = model
    with pytest.raises(ConfigError, match="torchvision, which is not installed; run shell/setup"):
        checks.check_policy(cfg)
