"""`rollout.engine=transformers`: the reference engine. It is simple, slow and right, starts in
seconds, and needs no vLLM."""

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil

from agent_loop.trajectory import Generated
from one_step_off.cluster.errors import SyncError
from one_step_off.config.errors import first_line, key_error
from one_step_off.config.lengths import engine_length
from one_step_off.config.placement import device_share, resolved_device
from one_step_off.config.roles import load_section_tokenizer
from one_step_off.config.schema import Config
from one_step_off.data.images import Images
from one_step_off.data.samples import PolicyVersion
from one_step_off.engines.engine import EngineLoad, GenerationRequest

MAX_SEQUENCES = 256
"""Requests in one call of `generate`, where the cache has room for them."""


def _limits(cfg: Config) -> list[tuple[str, bool, str, str]]:
    """What this engine does not offer: a key, whether its value is fine, the limit, and what to
    do."""
    roles = cfg.placement.roles
    shares_pool = list(roles.values()).count(roles.get("rollout", "")) > 1
    idles_only = shares_pool and resolved_device(cfg) != "cpu"
    in_flight = cfg.weight_sync.in_flight
    return [
        (
            "rollout.tensor_parallel_size",
            cfg.rollout.tensor_parallel_size == 1,
            "holds the whole model on one device",
            "set it to 1",
        ),
        (
            "rollout.engine_kwargs",
            not cfg.rollout.engine_kwargs,
            "takes no arguments of vLLM",
            "remove them",
        ),
        (
            "weight_sync.in_flight",
            in_flight != "keep",
            "keeps no cache over a sync",
            "use recompute",
        ),
        (
            "weight_sync.lora",
            cfg.weight_sync.lora != "adapter",
            "has no adapters apart from the weights",
            "use merged",
        ),
        (
            "agent.endpoint",
            not cfg.agent.endpoint,
            "serves no external agents",
            "remove it",
        ),
        (
            "placement.roles",
            not idles_only,
            "does not free its GPU for another role",
            "give the role rollout a pool of its own",
        ),
        (
            "placement.lend",
            not cfg.placement.lend or resolved_device(cfg) == "cpu",
            "does not free its GPU for another role",
            "set it to false",
        ),
    ]


class TransformersEngine:
    """An `Engine` of one worker in this process. A thread owns the model.

    See `generation_thread.GenerationThread` for how it generates, and
    `weight_receiving.WholeModelWorker` for how weights come into the model.
    """

    max_sequences = MAX_SEQUENCES

    def __init__(self, cfg: Config, device: str, seed: int = 0, log: str = "") -> None:
        """
        Args:
            cfg: of the run.
            device: "cpu" or "cuda".
            seed: of the requests that have none of their own.
            log: the file with the output of this process; the engine has no other.
        """
        self.cfg = cfg
        self.device = device
        self.random = np.random.default_rng(seed)
        self.tokenizer: Any = None
        self.started_requests = 0
        self.finished_requests = 0
        self.thread: Any = None
        self.worker: Any = None
        self.rules: Any = None

    @staticmethod
    def check(cfg: Config) -> None:
        """Raises ConfigError: the config asks for what this engine does not offer."""
        for key, is_offered, what, fix in _limits(cfg):
            if not is_offered:
                problem = f"rollout.engine=transformers {what}; {fix}, or use rollout.engine=vllm"
                raise key_error(cfg, key, problem)

    async def start(self) -> None:
        """See `Engine.start`."""
        # transformers' models are slow to import, and a check of the config needs none.
        from one_step_off.engines.transformers.generation_thread import GenerationThread

        self.thread = GenerationThread(MAX_SEQUENCES)
        try:
            await asyncio.wrap_future(self.thread.submit(self._load))
        except Exception as error:
            self.shutdown()
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise RuntimeError(f"its engine did not start: {reason}") from error

    def _load(self) -> None:
        """On the thread: load tokenizer and model."""
        from one_step_off.engines.transformers.stop_rules import StopRules
        from one_step_off.engines.transformers.weight_receiving import WholeModelWorker

        self.tokenizer = load_section_tokenizer(self.cfg, "model")
        model = _load_model(self.cfg, self.device)
        eos_of_model = model.generation_config.eos_token_id
        self.rules = StopRules.of_run(self.cfg, self.tokenizer, eos_of_model)
        cache_bytes = _cache_limit(self.cfg, model)
        self.worker = WholeModelWorker(model, cache_bytes)
        self.thread.use(model, cache_bytes // _cached_bytes_per_token(model))

    @property
    def load(self) -> EngineLoad:
        """See `Engine`. Its cache holds what it has begun to the end."""
        if self.thread is None:
            return EngineLoad()
        running = self.thread.running
        return EngineLoad(running, max(0, len(self.thread.unfinished) - running))

    def processes(self) -> Sequence[psutil.Process]:
        """It has none."""
        return ()

    @property
    def errored(self) -> bool:
        """Whether its thread has ended."""
        return self.thread is not None and self.thread.error is not None

    async def generate(self, request: GenerationRequest) -> Generated:
        """See `Engine.generate`."""
        from one_step_off.engines.transformers.generation_thread import RunningRequest

        if self.thread.error is not None:
            raise RuntimeError(str(self.thread.error))
        seed = request.seed
        if seed is None:
            seed = int(self.random.integers(1 << 63))
        rules = self.rules
        if request.stop:
            rules = dataclasses.replace(rules, texts=(*rules.texts, *request.stop))
        running = RunningRequest(request, rules, np.random.default_rng(seed))
        self.thread.add(running)
        self.started_requests += 1
        try:
            return await asyncio.wrap_future(running.answer)
        finally:
            self.finished_requests += 1
            if running.answer.cancelled():
                self.thread.wake()

    async def score(self, ids: np.ndarray, images: Images = ()) -> np.ndarray:
        """See `Engine.score`."""
        return await self._on_thread(self.thread.score, ids)

    async def heartbeat(self) -> None:
        """See `Engine.heartbeat`."""
        await self._on_thread(lambda: None)

    def has_unfinished_requests(self) -> bool:
        """See `Engine.has_unfinished_requests`."""
        return bool(self.thread.unfinished)

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """See `Engine.call_workers`."""
        try:
            return [await self._on_thread(lambda: getattr(self.worker, method)(*args))]
        except SyncError:
            raise
        except Exception as error:
            raise SyncError(f"{method}: {type(error).__name__}: {first_line(error)}") from error

    async def pause(self, wait: bool, clear_cache: bool) -> None:
        """See `Engine.pause`. Nothing computed is kept in any case: `clear_cache` must be true."""
        if not clear_cache:
            raise RuntimeError("the transformers engine keeps no cache over a sync")
        paused = await self._on_thread(self.thread.pause, wait)
        await asyncio.wrap_future(paused)

    async def resume(self, version: PolicyVersion) -> None:
        """See `Engine.resume`."""
        await self._on_thread(self.thread.resume, version)

    async def sleep(self) -> None:
        """It idles: the config check leaves CPUs alone."""

    async def wake_up(self, tags: list[str]) -> None:
        """It never sleeps."""

    def shutdown(self) -> None:
        """End the thread; open requests fail."""
        if self.thread is not None:
            self.thread.submit(self.thread.stop)

    async def _on_thread(self, function: Any, *args: Any) -> Any:
        """The result of a call between two forward passes. Raises RuntimeError: the engine died."""
        return await asyncio.wrap_future(self.thread.submit(function, *args))


def _load_model(cfg: Config, device: str) -> Any:
    """The policy's model in model.dtype on "cpu" or "cuda". Raises what transformers raises."""
    import torch
    from transformers import AutoModelForCausalLM

    from one_step_off.models.rope import fix_frequencies

    model = AutoModelForCausalLM.from_pretrained(
        cfg.model.path,
        dtype=getattr(torch, cfg.model.dtype),
        trust_remote_code=cfg.model.trust_remote_code,
    )
    # Before the cast to the device: the table is computed on the CPU.
    fix_frequencies(model, engine_length(cfg))
    model.requires_grad_(False)
    return model.eval().to(device)


def _cache_limit(cfg: Config, model: Any) -> int:
    """Bytes of the keys and values of one call at most."""
    import torch

    if model.device.type == "cpu":
        return cfg.rollout.kv_cache_mb << 20
    share = device_share(cfg, cfg.placement.roles["rollout"])
    total = torch.cuda.get_device_properties(model.device).total_memory
    usable = int(share * cfg.rollout.gpu_memory_utilization * total)
    # transformers' cache grows by copying itself, a layer at a time; logits need memory, too.
    return max(0, usable - torch.cuda.memory_allocated(model.device)) // 2


def _cached_bytes_per_token(model: Any) -> int:
    """Bytes of one token's keys and values, as far as the model's config tells."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None)
    head_size = head_size or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_size * model.dtype.itemsize
