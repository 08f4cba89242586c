"""The host's work per token, with a stand-in for the model.

vLLM's own scheduler, encoder, decoder and client run as in an engine that schedules ahead of its
GPU: two steps are in flight. Only the model is missing: its output is made up. So a figure is that
of the host's Python, whatever the device.
"""

from __future__ import annotations

import gc
import random
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from benchmarks.common.models import QWEN25_05B

T = TypeVar("T")

BLOCK_TOKENS = 16
PROMPT_TOKENS = 100
GROUP = 8
"""Requests with the same prompt, one after another."""
PARTS = ("schedule", "output update", "encoding", "transfer", "client")
STEPS_IN_FLIGHT = 2
ENDPOINT = "inproc://outputs"


@dataclass(frozen=True)
class Arm:
    """One way to run the engine's core and its client.

    Attributes:
        scheduler: the class, by name; None: vLLM's own.
        sampling: fields of vLLM's SamplingParams.
        read: what the program makes of vLLM's last output.
    """

    scheduler: str | None
    sampling: dict[str, Any]
    read: Callable[[Any], Any]


@dataclass
class Load:
    """What is generated.

    Attributes:
        rows: sequences at once.
        lengths: tokens of each response.
    """

    rows: int
    lengths: list[int]

    @classmethod
    def random(cls, rows: int, requests: int, longest: int) -> Load:
        """Responses of a third of `longest` up to `longest` tokens."""
        generator = random.Random(0)
        return cls(rows, [generator.randint(longest // 3, longest) for _ in range(requests)])

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return PROMPT_TOKENS + max(self.lengths)


@dataclass
class Clock:
    """Seconds of CPU time by part."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def timed(self, part: str, call: Callable[[], T]) -> T:
        """Call it, and count its time."""
        begin = time.thread_time()  # other processes on these cores do not count
        result = call()
        self.seconds[part] += time.thread_time() - begin
        return result


def engine_config(load: Load, scheduler: str | None) -> Any:
    """vLLM's config of an engine that schedules ahead, for a model of Qwen2.5-0.5B's shape."""
    from transformers import Qwen2Config
    from vllm import AsyncEngineArgs

    with tempfile.TemporaryDirectory() as folder:
        shape = {name: value for name, value in QWEN25_05B.items() if name != "head_dim"}
        Qwen2Config(architectures=["Qwen2ForCausalLM"], **shape).save_pretrained(folder)
        arguments = AsyncEngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            max_model_len=load.longest,
            max_num_seqs=load.rows,
            max_num_batched_tokens=8192,
            block_size=BLOCK_TOKENS,
            scheduler_cls=scheduler,
        )
        config = arguments.create_engine_config()
    config.scheduler_config.async_scheduling = True  # vLLM turns it off where it finds no GPU
    return config


def make_scheduler(load: Load, scheduler: str | None) -> Any:
    """The scheduler of an engine with one group of full attention."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = engine_config(load, scheduler)
    blocks = (1 + load.rows) * (load.longest // BLOCK_TOKENS + 2)
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(BLOCK_TOKENS, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    made = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["attention"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
    )
    made.use_v2_model_runner = True  # as on GPUs; without Triton vLLM takes the older one
    return made


class StandInModel:
    """Makes up a token and its log-prob for each row whose prompt is computed."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def output(self, scheduler: Any, scheduled: Any) -> Any:
        """What a model runner would return for this step."""
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        names = list(scheduled.num_scheduled_tokens)
        tokens = self.generator.integers(5, 50_000, len(names), dtype=np.int32)
        is_chunk = [scheduler.requests[name].is_prefill_chunk for name in names]
        sampled = [
            [] if chunk else [token] for chunk, token in zip(is_chunk, tokens.tolist(), strict=True)
        ]
        log_probs = -self.generator.random((len(names), 1), dtype=np.float32)
        ranks = np.ones(len(names), np.int32)
        rows = {name: row for row, name in enumerate(names)}
        log_prob_lists = LogprobsLists(tokens[:, None], log_probs, ranks)
        return ModelRunnerOutput(names, rows, sampled, log_prob_lists)


class HostRun:
    """All requests of a load through one arm."""

    def __init__(self, arm: Arm, load: Load) -> None:
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.engine.output_processor import OutputProcessor
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        init_none_hash(sha256)
        self.arm = arm
        self.load = load
        self.clock = Clock()
        self.scheduler = make_scheduler(load, arm.scheduler)
        self.model = StandInModel()
        self.encoder = MsgpackEncoder()
        self.decoder = MsgpackDecoder(EngineCoreOutputs)
        self.processor = OutputProcessor(None, log_stats=False)
        self.hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.buffer = bytearray()
        self.answers: list[Any] = []
        for number, length in enumerate(load.lengths):
            self.add(str(number), SamplingParams(max_tokens=length, **arm.sampling))

    def add(self, name: str, params: Any) -> None:
        """Give a request to the scheduler and to its client."""
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.request import Request

        first = int(name) // GROUP
        prompt = list(range(first, first + PROMPT_TOKENS))
        request = EngineCoreRequest(
            name, prompt, None, params, None, 0.0, None, None, None, external_req_id=name
        )
        self.processor.add_request(request, None)
        self.scheduler.add_request(Request.from_engine_core_request(request, self.hasher))

    def run(self) -> dict[str, float]:
        """Part -> microseconds per token."""
        import zmq

        in_flight: deque[tuple[Any, Any]] = deque()
        with zmq.Context() as context, context.socket(zmq.PULL) as self.pull:
            self.pull.bind(ENDPOINT)
            with context.socket(zmq.PUSH) as self.push:
                self.push.connect(ENDPOINT)
                while self.scheduler.has_requests() or in_flight:
                    scheduled = self.clock.timed("schedule", self.scheduler.schedule)
                    if scheduled.total_num_scheduled_tokens:
                        output = self.model.output(self.scheduler, scheduled)
                        in_flight.append((scheduled, output))
                    is_full = len(in_flight) == STEPS_IN_FLIGHT
                    if is_full or (in_flight and not scheduled.num_scheduled_tokens):
                        self.finish_step(*in_flight.popleft())
        assert len(self.answers) == len(self.load.lengths)
        tokens = sum(self.load.lengths)
        return {part: 1e6 * self.clock.seconds[part] / tokens for part in PARTS}

    def finish_step(self, scheduled: Any, output: Any) -> None:
        """The way of a step's tokens to what the program makes of them."""
        update = partial(self.scheduler.update_from_output, scheduled, output)
        for outputs in self.clock.timed("output update", update).values():
            outputs.weight_version = "0.0"
            encode = partial(self.encoder.encode_into, outputs, self.buffer)
            buffers = self.clock.timed("encoding", encode)
            send = partial(self.push.send_multipart, buffers, copy=False)
            self.clock.timed("transfer", send)
            receive = partial(self.pull.recv_multipart, copy=False)
            frames = self.clock.timed("transfer", receive)
            self.clock.timed("client", partial(self.receive, frames))

    def receive(self, frames: list[Any]) -> None:
        """What the client does with a message."""
        outputs = self.decoder.decode(frames)
        processed = self.processor.process_outputs(
            outputs.outputs, weight_version=outputs.weight_version
        )
        self.answers += [self.arm.read(answer) for answer in processed.request_outputs]


def measure(arms: dict[str, Arm], load: Load, repeats: int) -> dict[str, list[dict[str, float]]]:
    """Arm -> part -> microseconds per token, of each repeat. The arms alternate."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, arm in arms.items():
            run = HostRun(arm, load)
            gc.collect()
            gc.freeze()  # as vLLM's engine core does after its start
            found[name].append(run.run())
            gc.unfreeze()
    return found
