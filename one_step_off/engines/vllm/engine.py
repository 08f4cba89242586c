"""`VllmEngine`: vLLM's `AsyncLLM` behind the Engine seam, see `engines/engine.py`."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import psutil

from agent_loop.base import Generated
from one_step_off.cluster.errors import SyncError
from one_step_off.config.lora_checks import sends_adapters
from one_step_off.config.schema import Config
from one_step_off.data.images import Images, open_image
from one_step_off.data.samples import PolicyVersion
from one_step_off.engines.engine import EngineLoad, GenerationRequest
from one_step_off.engines.vllm import checks
from one_step_off.engines.vllm.core_process import start_engine, start_fork_server
from one_step_off.engines.vllm.engine_args import engine_args
from one_step_off.engines.vllm.kv_cache import apply_plan, measuring_turn, plan_kv_cache
from one_step_off.engines.vllm.processes import (
    engine_processes,
    failed_start_names_its_reason,
)
from one_step_off.engines.vllm.prompt_scores import log_probs_of
from one_step_off.models.vision import forbidden_tokens, policy_vision_config


class VllmEngine:
    """One `AsyncLLM` with `tensor_parallel_size` workers. See `Engine`.

    Attributes:
        llm: the `AsyncLLM`; None before `start`.
        start_note, longest_sequences: see `Engine`.
    """

    returns_experts = True
    quantizes = True
    speculates = True

    def __init__(self, cfg: Config, device: str, seed: int = 0, log: str = "") -> None:
        """
        Args:
            device: "cpu" or "cuda".
            seed: see `sampling.engine_seed`.
            log: the file with the output of this process; "": it has none of its own.
        """
        self.cfg = cfg
        self.device = device
        self.seed = seed
        self.log = log
        self.llm: Any = None
        self.reports: Any = None  # `LoadReports`
        self.max_sequences = 0
        self.longest_sequences = math.inf
        self.start_note = ""
        self.started_requests = 0
        self.finished_requests = 0
        self.sleeping: set[str] = set()  # the parts that have no memory
        self.vision: Any = None  # the `hf_config` of a model that reads images
        self.lora_request: Any = None  # of every request, where the engine has the adapters apart
        self.own_processes: list[psutil.Process] = []

    @staticmethod
    def check(cfg: Config) -> None:
        """Refuse what the installed vLLM cannot do; see `Engine`."""
        checks.check_policy(cfg)

    @staticmethod
    def check_agents(cfg: Config) -> None:
        """See `ServesAgents`."""
        from one_step_off.engines.vllm.chat.parsers import check_parsers

        check_parsers(cfg)

    async def start(self) -> None:
        """See `Engine`."""
        start_fork_server(self.device)
        from one_step_off.engines.vllm.cpu_models import engine_config as config_of

        arguments = engine_args(self.cfg, self.device, self.seed)
        self.vision = policy_vision_config(self.cfg)
        if self.vision is not None:  # else it keeps memory for videos too
            arguments = {"limit_mm_per_prompt": {"video": 0}} | arguments
        self.lora_request = request_of_policy(self.cfg)
        with failed_start_names_its_reason("its engine did not start", self.log):
            engine_config = config_of(arguments)
            if self.device == "cuda":
                self._size_kv_cache(engine_config)
            with measuring_turn(self.cfg, "rollout", self.device, engine_config):
                self.llm = start_engine(engine_config, arguments, self.device)
        if self.cfg.rollout.replay_routing:
            notes = (self.start_note, experts_note(self.cfg, self.llm.vllm_config.model_config))
            self.start_note = "; ".join(filter(None, notes))
        if self.cfg.rollout.speculation != "none":
            await self.call_workers("let_drafts_reach_the_end")
        from one_step_off.engines.vllm.engine_stats import LoadReports

        self.reports = LoadReports(self.llm)
        self.max_sequences = self.llm.vllm_config.scheduler_config.max_num_seqs
        known = self.llm.vllm_config.cache_config.kv_cache_max_concurrency
        self.longest_sequences = known or math.inf  # a model without attention has no such cache
        self.own_processes = engine_processes()

    def _size_kv_cache(self, engine_config: Any) -> None:
        """Bound the KV cache of vLLM's `VllmConfig`, where that is safe; see `kv_cache`."""
        from vllm.platforms import current_platform

        gpu_bytes = current_platform.get_device_total_memory()
        plan = plan_kv_cache(self.cfg, engine_config, gpu_bytes)
        if plan is not None:
            apply_plan(plan, engine_config, gpu_bytes)
            self.start_note = str(plan)

    @property
    def load(self) -> EngineLoad:
        """See `Engine`."""
        return self.reports.load if self.reports else EngineLoad()

    def agent_serving(self, tokenizer: Any) -> Any:
        """See `ServesAgents`."""
        # vLLM's HTTP classes are slow to import, and most runs need none.
        from one_step_off.engines.vllm.chat.serving import Serving

        return Serving(self.cfg, self.llm, tokenizer)

    def processes(self) -> list[psutil.Process]:
        """See `Engine`."""
        return self.own_processes

    @property
    def errored(self) -> bool:
        """See `Engine`."""
        return self.llm is not None and self.llm.errored

    async def heartbeat(self) -> None:
        """See `Engine`."""
        await self.llm.is_sleeping()

    def has_unfinished_requests(self) -> bool:
        """See `Engine`."""
        return self.llm.output_processor.has_unfinished_requests()

    # --- requests ---------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Generated:
        """See `Engine`."""
        params = sampling_params(self.cfg, request)
        if self.vision is not None:
            forbid_tokens(params, forbidden_tokens(self.vision))
        output = await self._request(request.ids, params, request.images)
        generated = generated_tokens(output)
        if self.cfg.rollout.replay_routing:
            return replace(generated, experts=experts_of(output))
        return generated

    async def score(self, ids: np.ndarray, images: Images = ()) -> np.ndarray:
        """See `Engine`."""
        return await log_probs_of(partial(self._request, images=images), ids)

    async def _request(self, ids: np.ndarray, params: Any, images: Images = ()) -> Any:
        """The engine's last output for these token ids, int32 [T]."""
        self.started_requests += 1
        name = str(self.started_requests)
        params.skip_clone = True  # no other request changes these settings
        # Marked as tokens: a prompt would else travel through a thread that has nothing to
        # tokenize.
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": ids.tolist()}
        if images:
            prompt = prompt_with_images(ids, images, self.vision.image_token_id)
        answers = self.llm.generate(prompt, params, name, lora_request=self.lora_request)
        try:
            outputs = [output async for output in answers]
            if images and outputs[-1].prompt_token_ids != ids.tolist():
                raise RuntimeError(
                    f"the engine read {len(outputs[-1].prompt_token_ids)} tokens in a prompt with "
                    f"images that has {len(ids)}: its image processor is not the trainer's"
                )
            return outputs[-1]
        finally:
            self.finished_requests += 1

    # --- weights ----------------------------------------------------------------------------------

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """See `Engine`."""
        try:
            return await self.llm.collective_rpc(method, args=args)
        except Exception as e:  # vLLM passes on the text of its workers' errors, but not their type
            lines = str(e).strip().splitlines() or [type(e).__name__]
            message = lines[-1].removeprefix("Call to collective_rpc method failed: ")
            raise SyncError(message) from e

    async def pause(self, wait: bool, clear_cache: bool) -> None:
        """See `Engine`."""
        # Not AsyncLLM.pause_generation: it sleeps another 20 ms, for callers to whom the order of
        # outputs matters.
        mode = "wait" if wait else "keep"
        if clear_cache and self.vision is not None:
            # The engine forgets the pixels of images too, and must get them again.
            await self.llm.renderer.clear_mm_cache_async()
        await self.llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)

    async def resume(self, version: PolicyVersion) -> None:
        """See `Engine`."""
        attempt, number = version
        await self.llm.update_weight_version(f"{attempt}.{number}")
        await self.llm.resume_generation()

    async def sleep(self) -> None:
        """See `Engine`."""
        # A sync that failed has woken the weights alone: they must go to sleep again. vLLM itself
        # does nothing while the weights sleep.
        if self.device == "cuda" and "weights" not in self.sleeping:
            await self.llm.sleep(level=2)
            self.sleeping = {"weights", "kv_cache"}

    async def wake_up(self, tags: list[str]) -> None:
        """See `Engine`."""
        asleep = [tag for tag in tags if tag in self.sleeping]
        if asleep:
            await self.llm.wake_up(asleep)
            self.sleeping.difference_update(asleep)

    def shutdown(self) -> None:
        """See `Engine`."""
        if self.llm is not None:
            self.llm.shutdown()


def prompt_with_images(ids: np.ndarray, images: Images, image_token: int) -> dict[str, Any]:
    """vLLM's prompt of a context with images. It has one token for each image, which vLLM replaces
    by as many as the image has parts: the run of tokens that stands in `ids`, int32 [T]."""
    is_image = ids == image_token
    goes_on = np.append(False, is_image[:-1]) & is_image
    pictures = [open_image(image) for image in images]
    return {"prompt_token_ids": ids[~goes_on].tolist(), "multi_modal_data": {"image": pictures}}


def forbid_tokens(params: Any, tokens: list[int]) -> None:
    """Let vLLM sample none of these tokens, with the smallest bias that it knows."""
    params.logit_bias = (params.logit_bias or {}) | dict.fromkeys(tokens, -100.0)


def sampling_params(cfg: Config, request: GenerationRequest) -> Any:
    """vLLM's `SamplingParams` of a request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from one_step_off.engines.vllm.schedulers import COLUMN

    user_settings = dict(cfg.rollout.sampling_kwargs)
    if request.stop:
        run_stops = user_settings.get("stop") or []
        if isinstance(run_stops, str):
            run_stops = [run_stops]
        user_settings["stop"] = [*run_stops, *request.stop]
    settings: dict[str, Any] = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "max_tokens": request.max_tokens,
        "seed": request.seed,
        "logprobs": 0,
        "flat_logprobs": True,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    needs_text = "stop" in user_settings  # words to stop at are found in text
    if not needs_text:  # else the client may end the request, and the engine sends no last output
        settings["extra_args"] = {COLUMN: True}
    return SamplingParams(**settings, **({"detokenize": needs_text} | user_settings))


def experts_note(cfg: Config, model_config: Any) -> str:
    """How many bytes the experts of samples take at most. `model_config`: vLLM's."""
    choices = model_config.get_total_num_hidden_layers() * model_config.get_num_experts_per_tok()
    per_token = choices * (1 if model_config.get_num_experts() <= 256 else 2)
    per_sample = per_token * (cfg.data.max_prompt_length + cfg.data.max_response_length - 1)
    per_step = per_sample * cfg.data.train_batch_size * cfg.rollout.n
    return (
        f"router replay: {per_token} bytes per token, at most {per_sample / 1e6:.3g} MB per sample "
        f"and {per_step / 1e9:.3g} GB per step"
    )


def experts_of(output: Any) -> np.ndarray:
    """The experts of all tokens of vLLM's last `RequestOutput` of a request but the last one, which
    the model has not read: uint8 or uint16 [P + R - 1, layers, experts per token].

    Raises:
        RuntimeError: they are not there for every token.
    """
    completion = output.outputs[0]
    experts = completion.routed_experts
    wanted = len(output.prompt_token_ids) + len(completion.token_ids) - 1
    count = 0 if experts is None else len(experts)
    if count != wanted:
        raise RuntimeError(f"the engine gave the experts of {count} tokens, not of {wanted}")
    return experts


def request_of_policy(cfg: Config) -> Any:
    """The `LoRARequest` that every request carries; None where the adapters are merged.

    No request may go without: on CPUs vLLM would give it the adapter of its neighbours in the batch
    or none, by chance.
    """
    if not sends_adapters(cfg):
        return None
    from vllm.lora.request import LoRARequest  # vLLM takes seconds to import

    from one_step_off.weight_sync.base_weights import ADAPTER_ID

    return LoRARequest("policy", ADAPTER_ID, "in memory: weight_sync.lora=adapter")


def token_versions(spans: Any, length: int) -> tuple[int, np.ndarray]:
    """The weights that made each token of a response.

    Args:
        spans: vLLM's spans of weight versions, labeled "attempt.version".
        length: tokens of the response.

    Returns:
        The attempt, and the version of each token, int32 [length].

    Raises:
        RuntimeError: a token has no version, or the spans have two attempts.
    """
    versions = np.full(length, -1, dtype=np.int32)
    attempts = set()
    for span in spans or ():
        attempt, version = span.version.split(".")
        versions[span.start : span.end] = int(version)
        attempts.add(int(attempt))
    several_attempts = length > 0 and len(attempts) != 1
    if several_attempts or (versions < 0).any():
        raise RuntimeError(
            f"the engine stamped {length} tokens with {spans}: expected one known version for each"
        )
    return next(iter(attempts), 0), versions


def generated_tokens(output: Any) -> Generated:
    """vLLM's last `RequestOutput` of a request as the tokens of one turn.

    Raises:
        RuntimeError: a token has no version, or there is not one log-prob per token.
    """
    from one_step_off.engines.vllm.engine_stats import WAITS
    from one_step_off.engines.vllm.schedulers import column_of

    completion = output.outputs[0]
    tokens = np.asarray(completion.token_ids, dtype=np.int32)
    attempt, versions = token_versions(completion.weight_versions, len(tokens))
    log_probs = column_of(output)
    if log_probs is None:
        log_probs = np.asarray(completion.logprobs.logprobs, dtype=np.float32)
    if len(log_probs) != len(tokens):
        raise RuntimeError(f"the engine gave {len(log_probs)} log-probs for {len(tokens)} tokens")
    draft_tokens = None
    counts = completion.spec_decode_metrics
    if counts is not None:
        accepted = sum(size * times for size, times in enumerate(counts.histogram))
        draft_tokens = (counts.num_draft_tokens, accepted)
    queue_s, prefill_s = (output.kv_transfer_params or {}).get(WAITS, (0.0, 0.0))
    return Generated(
        tokens,
        log_probs,
        versions,
        attempt,
        str(completion.finish_reason),
        queue_s=queue_s,
        prefill_s=prefill_s,
        draft_tokens=draft_tokens,
    )
