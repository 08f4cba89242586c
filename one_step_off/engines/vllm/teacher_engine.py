"""A teacher in a vLLM engine, as a plain class that becomes a Ray actor: it scores given tokens,
and generates nothing that is used."""

import asyncio
from typing import Any

import numpy as np
import psutil
import ray

from one_step_off.cluster.resource_usage import UsageProbe
from one_step_off.config.lengths import longest_sequence
from one_step_off.config.placement import device_share
from one_step_off.config.roles import role_settings, vocabulary_size
from one_step_off.config.schema import Config
from one_step_off.data.packing import PackedArrays
from one_step_off.engines.engine_processes import not_running
from one_step_off.engines.vllm.core_process import start_engine, start_fork_server
from one_step_off.engines.vllm.engine_args import (
    CPU_ENGINE_ARGS,
    MAX_BATCHED_TOKENS,
    WORKER_EXTENSION,
)
from one_step_off.engines.vllm.kv_cache import measuring_turn
from one_step_off.engines.vllm.processes import (
    engine_processes,
    failed_start_names_its_reason,
)
from one_step_off.engines.vllm.prompt_scores import log_probs_of, top_log_probs_of


def teacher_engine_args(cfg: Config, device: str) -> dict[str, Any]:
    """The fields of vLLM's `AsyncEngineArgs` for a teacher. `teacher.engine_kwargs` override them.

    `device`: "cpu" or "cuda".
    """
    width = role_settings(cfg, "teacher").tensor_parallel_size
    # vLLM takes a prompt only where one more token fits.
    longest = longest_sequence(cfg) + 1
    args: dict[str, Any] = {
        "model": cfg.teacher.path,
        "dtype": cfg.model.dtype,
        "trust_remote_code": cfg.model.trust_remote_code,
        "max_model_len": longest,
        "tensor_parallel_size": width,
        "seed": cfg.trainer.seed,
        "disable_log_stats": True,
        # As for the replicas: the workers belong into this actor.
        "distributed_executor_backend": "mp" if width > 1 else "uni",
        "max_logprobs": max(1, cfg.teacher.top_k),
        "max_num_batched_tokens": max(MAX_BATCHED_TOKENS, longest),
    }
    if device == "cpu":
        args |= CPU_ENGINE_ARGS | {"kv_cache_memory_bytes": cfg.rollout.kv_cache_mb << 20}
        args["worker_extension_cls"] = WORKER_EXTENSION  # its import prepares the worker
    else:
        share = device_share(cfg, cfg.placement.roles["teacher"])
        args["gpu_memory_utilization"] = share * cfg.rollout.gpu_memory_utilization
    return args | cfg.teacher.engine_kwargs


class TeacherEngine(UsageProbe):
    """One engine that scores sequences."""

    calls_at_once = 1000
    threads = {"control": 1}  # an event loop of its own for `alive`

    def __init__(self, cfg: Config, index: int, device: str, log: str = "") -> None:
        """
        Args:
            index: of this engine among those of the teacher.
            device: "cpu" or "cuda".
            log: the file with the output of this process.
        """
        self.cfg = cfg
        self.index = index
        self.device = device
        self.log = log
        self.llm: Any = None
        self.engine_processes: list[psutil.Process] = []
        self.requests = 0

    async def start(self) -> None:
        """Load the engine.

        Raises:
            ProcessDied: a process of the engine was killed.
            RuntimeError: vLLM cannot serve this model here.
        """
        start_fork_server(self.device)
        from one_step_off.engines.vllm.cpu_models import engine_config as config_of

        self.vocabulary = vocabulary_size(self.cfg)
        arguments = teacher_engine_args(self.cfg, self.device)
        what_failed = f"teacher.path={self.cfg.teacher.path}: vLLM cannot serve it here"
        with failed_start_names_its_reason(what_failed, self.log):
            engine_config = config_of(arguments)
            with measuring_turn(self.cfg, "teacher", self.device, engine_config):
                self.llm = start_engine(engine_config, arguments, self.device)
        self.engine_processes = engine_processes()

    async def score_responses(self, work: tuple[list[np.ndarray], list[int]]) -> list[np.ndarray]:
        """As `TeacherWorker.score_responses`.

        Args:
            work: prompts with their responses, int32 [T] each; and the first place of each
                response, at least 1.

        Raises:
            RuntimeError: the teacher proposes tokens that the student does not have, or its
                log-probs are NaN.
        """
        pairs = zip(*work, strict=True)
        outputs = await asyncio.gather(*(self._output(*pair) for pair in pairs))
        # So it is where vLLM has loaded a quantized checkpoint without one of its scales.
        if any(np.isnan(output).any() for output in outputs):
            raise RuntimeError(
                f"teacher.path={self.cfg.teacher.path}: vLLM's log-probs are NaN; its weights are "
                "not complete, or its quantization does not work with this build of vLLM"
            )
        return PackedArrays(outputs)

    async def _output(self, ids: np.ndarray, first: int) -> np.ndarray:
        count = self.cfg.teacher.top_k
        if first == len(ids):  # an empty response
            return np.zeros((0, 1 + 2 * count) if count else 0, np.float32)
        if not count:
            return (await log_probs_of(self._request, ids))[first - 1 :]
        output = await top_log_probs_of(self._request, ids, first, count)
        largest = int(output[:, 1 + count :].max())
        if largest >= self.vocabulary:
            raise RuntimeError(
                f"the teacher proposes token {largest}, and the student has {self.vocabulary}; "
                "lower teacher.top_k, or use teacher.backend=fsdp, which leaves such tokens out"
            )
        return output

    async def _request(self, ids: np.ndarray, params: Any) -> Any:
        """The engine's last output for these token ids, int32 [T]."""
        self.requests += 1
        name = str(self.requests)
        prompt = {"type": "token", "prompt_token_ids": ids.tolist()}
        outputs = [output async for output in self.llm.generate(prompt, params, name)]
        return outputs[-1]

    @ray.method(concurrency_group="control")
    async def alive(self) -> None:
        """Answer, however busy this process and its engine are.

        Raises:
            RuntimeError: the engine died.
        """
        if self.llm is not None and self.llm.errored:
            raise RuntimeError(f"engine {self.index} of the teacher died")
        for process in self.engine_processes:
            state = not_running(process)
            if state:
                raise RuntimeError(
                    f"engine {self.index} of the teacher, process {process.pid}, is {state}"
                )

    async def stop(self) -> None:
        """End the engine's processes."""
        if self.llm is not None:
            self.llm.shutdown()
