"""Drives a scheduler of vLLM with random requests and a stand-in for the model, and writes down
what it does. Two schedulers that decide the same leave the same record.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.outputs import DraftTokenIds, LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

from one_step_off.engines.vllm.engine_args import TRY_SPECULATION
from one_step_off.engines.vllm.schedulers import COLUMN, column_of

BLOCK_TOKENS = 4
ROWS = 8
STOP_TOKEN = 7
VOCABULARY = 40


@dataclass(frozen=True)
class Scene:
    """What is driven.

    Attributes:
        is_async: two steps are in flight, as on a GPU.
        blocks: of the KV cache; few of them make preemptions.
        drafts: draft tokens of each row, which may be accepted.
        requests: how many.
        kinds: of requests, see `Drive.params`.
        has_stats: the scheduler notes when each request was queued and scheduled.
        is_second_runner: it works for vLLM's second model runner, as on GPUs.
        has_states: half of the layers keep a state in place of keys and values.
        tries: it measures whether drafts pay.
        method: of the drafts.
    """

    is_async: bool = True
    blocks: int = 40
    drafts: int = 0
    requests: int = 60
    kinds: tuple[str, ...] = ("column",)
    seed: int = 0
    has_stats: bool = False
    is_second_runner: bool = False
    has_states: bool = False
    tries: bool = False
    method: str = "ngram"


def make_scheduler(scheduler: Any, model: str, scene: Scene) -> Any:
    """A scheduler with a group of full attention, and perhaps one of states. `scheduler`: a class,
    or a name."""
    drafting = {"method": "ngram", "num_speculative_tokens": scene.drafts, "prompt_lookup_max": 2}
    config = AsyncEngineArgs(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=ROWS,
        max_num_batched_tokens=48,
        long_prefill_token_threshold=10,
        block_size=32,
        speculative_config=drafting if scene.drafts else None,
    ).create_engine_config()
    config.scheduler_config.async_scheduling = scene.is_async
    config.cache_config.num_gpu_blocks = scene.blocks
    if scene.tries:
        config.additional_config[TRY_SPECULATION] = True
        config.speculative_config.method = scene.method
    spec = FullAttentionSpec(BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    if scene.has_states:
        config.cache_config.mamba_cache_mode = "align"  # what vLLM chooses with prefix caching
        states = MambaSpec(
            BLOCK_TOKENS, shapes=((8, 8),), dtypes=(torch.float32,), mamba_cache_mode="align"
        )
        groups.append(KVCacheGroupSpec(["recurrent layer"], states))
    made = scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(scene.blocks, [], groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        log_stats=scene.has_stats,
    )
    # Of the platform, and read by the scheduler alone.
    made.use_v2_model_runner = scene.is_second_runner
    return made


@dataclass
class Record:
    """What a scheduler did, and what its client received.

    Attributes:
        steps: of each step the rows with their tokens, new blocks, preempted and ended requests,
            and the hashes of all cached blocks.
        answers: request -> token ids, log-probs, weight versions, cached tokens, why it ended.
        prompt_log_probs: request -> those of its prompt.
        events: when each request was queued, scheduled and preempted, as its client is told.
        hits: tokens of prompts that were found in the prefix cache.
        messages: outputs with log-probs of their own.
    """

    steps: list[Any] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)
    prompt_log_probs: dict[str, Any] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)
    hits: int = 0
    preemptions: int = 0
    messages: int = 0


class Drive:
    """One scheduler with its client."""

    def __init__(self, scheduler: Any, scene: Scene) -> None:
        init_none_hash(sha256)
        self.scene = scene
        self.scheduler = scheduler
        self.random = random.Random(scene.seed)
        self.hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.processor = OutputProcessor(None, log_stats=False)
        self.encoder, self.decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        self.record = Record()
        self.asked: list[str] = []
        self.version = 0
        self.paused_steps = 0

    def params(self, kind: str) -> SamplingParams:
        """Of a request: "column" asks for one; the others are as in vLLM."""
        final, delta = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA
        fields: dict[str, dict[str, Any]] = {
            "column": {"logprobs": 0, "output_kind": final, "extra_args": {COLUMN: True}},
            "final": {"logprobs": 0, "output_kind": final},
            "streamed": {"logprobs": 0, "output_kind": delta},
            "top": {"logprobs": 2, "output_kind": final},
            "none": {"output_kind": final},
            "scored": {"prompt_logprobs": 0, "output_kind": final},
        }
        most = 1 if kind == "scored" else self.random.randint(1, 30)
        return SamplingParams(
            max_tokens=most,
            stop_token_ids=[STOP_TOKEN],
            flat_logprobs=True,
            detokenize=False,
            **fields[kind],
        )

    def add(self) -> None:
        """A request; its prompt begins as others do."""
        name = str(len(self.asked))
        params = self.params(self.random.choice(self.scene.kinds))
        shared = self.random.randint(0, 3)
        length = self.random.randint(1, 20)
        own = [self.random.randrange(8, VOCABULARY) for _ in range(self.random.randint(0, 4))]
        prompt = [10 + shared] * length + own
        prompt = prompt or [10]
        request = EngineCoreRequest(
            name, prompt, None, params, None, 0.0, None, None, None, external_req_id=name
        )
        self.asked.append(name)
        self.processor.add_request(request, None)
        self.scheduler.add_request(Request.from_engine_core_request(request, self.hasher))

    def disturb(self) -> None:
        """What else may happen between two steps."""
        if self.paused_steps:
            self.paused_steps -= 1
            if not self.paused_steps:
                self.resume()
            return
        chance = self.random.random()
        if chance < 0.04 and self.asked:
            name = self.random.choice(self.asked[-20:])
            self.processor.abort_requests([name], internal=False)
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        elif chance < 0.06:
            # A sync: caches are cleared, running requests computed again, with other weights.
            self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
            self.resume()
        elif chance < 0.10:
            # A sync that keeps the caches. The steps in flight end meanwhile.
            self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            self.paused_steps = 3

    def resume(self) -> None:
        """With other weights."""
        self.version += 1
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def run(self) -> Record:
        """All requests to their end."""
        in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        while len(self.asked) < self.scene.requests or self.scheduler.has_requests() or in_flight:
            for _ in range(self.random.randint(0, 2)):
                if len(self.asked) < self.scene.requests:
                    self.add()
            self.disturb()
            scheduled = self.scheduler.schedule()
            self.note(scheduled)
            if scheduled.num_scheduled_tokens:
                in_flight.append((scheduled, self.output_of(scheduled)))
            is_full = len(in_flight) == 1 + self.scene.is_async
            if is_full or (in_flight and not scheduled.num_scheduled_tokens):
                self.finish(*in_flight.popleft())
        return self.record

    def note(self, scheduled: Any) -> None:
        """Write a step down."""
        pool = self.scheduler.kv_cache_manager.block_pool
        new = [(new.req_id, new.block_ids) for new in scheduled.scheduled_new_reqs]
        cached = scheduled.scheduled_cached_reqs
        self.record.preemptions += len(scheduled.preempted_req_ids)
        self.record.steps.append(
            (
                dict(scheduled.num_scheduled_tokens),
                new,
                list(
                    zip(
                        cached.req_ids,
                        cached.new_block_ids,
                        cached.num_computed_tokens,
                        cached.num_output_tokens,
                        strict=True,
                    )
                ),
                (scheduled.total_num_scheduled_tokens, cached.all_token_ids),
                sorted(cached.resumed_req_ids),
                sorted(scheduled.preempted_req_ids),
                sorted(scheduled.finished_req_ids),
                sorted(map(repr, pool.cached_block_hash_to_block._cache)),
                pool.get_num_free_blocks(),
                {name: self.books(r) for name, r in self.scheduler.requests.items()},
            )
        )

    def books(self, request: Any) -> list[Any]:
        """What the scheduler knows of a request."""
        names = (
            "num_computed_tokens num_in_flight_tokens num_output_placeholders is_prefill_chunk "
            "last_sched_seq spec_token_ids status"
        )
        values = [getattr(request, name) for name in names.split()]
        # The step from which on it may be scheduled: compared where the runner has such steps.
        return [*values, request.next_decode_eligible_step, list(request.block_hashes)]

    def output_of(self, scheduled: Any) -> ModelRunnerOutput:
        """What a model runner returns: for each row whose prompt is computed a token, and as many
        drafts as are right; with log-probs that only such a token and place have."""
        names = list(scheduled.num_scheduled_tokens)
        sampled, starts = [], [0]
        for name in names:
            request = self.scheduler.requests[name]
            drafts = scheduled.scheduled_spec_decode_tokens.get(name, ())
            count = 0 if request.is_prefill_chunk else 1 + self.random.randint(0, len(drafts))
            sampled.append([self.random.randrange(VOCABULARY) for _ in range(count)])
            starts.append(starts[-1] + max(count, 1))
        if not self.scene.drafts:
            starts = None
        lines = starts[-1] if starts else len(names)
        values = [self.random.random() for _ in range(3 * lines)]
        log_probs = -np.array(values, np.float32).reshape(lines, 3)
        ids = np.arange(3 * lines, dtype=np.int32).reshape(lines, 3)
        asks = any(
            (self.scheduler.requests[name].sampling_params.num_logprobs is not None)
            for name in names
        )
        lists = LogprobsLists(ids, log_probs, np.ones(lines, np.int32), starts) if asks else None
        return ModelRunnerOutput(
            names,
            {name: row for row, name in enumerate(names)},
            sampled,
            lists,
            prompt_logprobs_dict=dict(self.prompt_log_probs_of(scheduled)),
        )

    def prompt_log_probs_of(self, scheduled: Any) -> Iterator[tuple[str, Any]]:
        """Those of the prompts that are computed to their end and asked for them."""
        from vllm.v1.outputs import LogprobsTensors

        for name in scheduled.num_scheduled_tokens:
            request = self.scheduler.requests[name]
            asks = request.sampling_params.prompt_logprobs is not None
            if asks and not request.is_prefill_chunk and not request.num_output_tokens:
                count = request.num_prompt_tokens - 1
                column = torch.arange(count)[:, None]
                yield name, LogprobsTensors(column, -column / 8, column[:, 0] + 1)

    def finish(self, scheduled: Any, output: ModelRunnerOutput) -> None:
        """Give a step's tokens to the scheduler, and what it returns to the client."""
        outputs_by_client = self.scheduler.update_from_output(scheduled, output)
        for outputs in outputs_by_client.values():
            outputs.weight_version = f"0.{self.version}"
            outputs.scheduler_stats = None
            self.record.events += [
                (one.request_id, event.type)
                for one in outputs.outputs
                for event in one.events or ()
            ]
            self.record.messages += sum(one.new_logprobs is not None for one in outputs.outputs)
            received = self.decoder.decode(self.encoder.encode(outputs))
            processed = self.processor.process_outputs(
                received.outputs, weight_version=received.weight_version
            )
            for answer in processed.request_outputs:
                self.read(answer)
        if self.scene.drafts:
            names = [name for name in output.req_ids if name in self.scheduler.requests]
            most = scheduled.num_spec_tokens_to_schedule
            drafts = [[1] * self.random.randint(0, most) for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def read(self, answer: Any) -> None:
        """Keep what the client of a request receives."""
        completion = answer.outputs[0]
        column = column_of(answer)
        log_probs = completion.logprobs.logprobs if completion.logprobs is not None else None
        if column is not None:
            assert not log_probs
            log_probs = column.tolist()
        spans = completion.weight_versions
        hits = answer.num_cached_tokens or 0
        if answer.finished:
            self.record.hits += hits
        more = (list(completion.token_ids), log_probs, spans, hits, completion.finish_reason)
        self.record.answers.setdefault(answer.request_id, []).append(more)
        if answer.prompt_logprobs is not None:
            self.record.prompt_log_probs[answer.request_id] = answer.prompt_logprobs.logprobs
