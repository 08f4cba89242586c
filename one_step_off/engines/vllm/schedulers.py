"""The scheduler of vLLM's engine in a run: vLLM's own, with less work per token. It decides what
vLLM's decides.

- `ReportingScheduler` (engine_stats.py): how full the engine is, and how long requests wait.
- `LogProbColumns`: the log-probs of a response leave the engine's process once, as one column.
- `BlockEdges`: the books of the KV cache's blocks are opened where a block begins or ends.
- `ReplicaScheduler`: all of these, and a short way for rows that get one more token and nothing
  else, when a step is scheduled and when its tokens arrive.
- `PrefixesPerVersion`: each version of the weights has prefix caches of its own
  (`weight_sync.in_flight=keep`). vLLM clears its prefix cache only together with the KV caches of
  unfinished requests, and `keep` keeps those. So a prefix is known by the version that computed it,
  too. Only the engine's process can tell that version: a request may wait there while the weights
  change.

A GPU takes less time for a step of 512 sequences of a small model than vLLM's Python around it.
"""

from __future__ import annotations

import copy
import time
from array import array
from collections import defaultdict
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds

from one_step_off.engines.vllm.engine_args import RETURN_EXPERTS, TRY_SPECULATION
from one_step_off.engines.vllm.engine_stats import WAITS, ReportingScheduler, waits_of
from one_step_off.engines.vllm.speculation import SpeculationTrials

logger = init_logger("vllm.one_step_off")  # below "vllm", so that its messages are shown

COLUMN = "log_prob_column"
"""The key under which a request asks for its log-probs as a column, in SamplingParams.extra_args,
and under which its last output has them, in kv_transfer_params."""


def column_of(output: Any) -> np.ndarray | None:
    """The log-probs of vLLM's `RequestOutput`, float32 [T]; None: they are where vLLM puts them,
    because its own scheduler is used."""
    column = (output.kv_transfer_params or {}).get(COLUMN)
    return None if column is None else np.frombuffer(column, np.float32)


class LogProbColumns(ReportingScheduler):
    """Keeps the log-probs of the requests that ask for a column (`COLUMN`), and gives the last
    output all of them, and how long the request waited. Token ids leave at once, as ever: the
    client gives each the weight version under which it arrives.

    vLLM cuts, packs and unpacks three small arrays for each new token, and its client appends the
    values to six lists.

    Only a request that the engine alone ends, with its last output (`RequestOutputKind.FINAL_ONLY`,
    no stop strings, n = 1, log-probs of the sampled token alone), may ask for a column. All others
    are as in vLLM. The column of an aborted request is lost.
    """

    def add_request(self, request: Any) -> None:
        """Take a request. Its column is its own, so it goes when vLLM drops the request."""
        params = request.sampling_params
        asks = params is not None and COLUMN in (params.extra_args or {})
        request.log_prob_column = array("f") if asks else None
        super().add_request(request)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """What vLLM's own method returns, with the log-probs of columns in last outputs alone."""
        log_probs = model_runner_output.logprobs
        if log_probs is None:
            return super().update_from_output(scheduler_output, model_runner_output)
        # The scheduler forgets a request in the step in which it ends.
        requests: dict[str, Any] = self.requests
        known = {
            name: requests[name]
            for name in scheduler_output.num_scheduled_tokens
            if name in requests
        }
        if all(request.log_prob_column is not None for request in known.values()):
            model_runner_output.logprobs = None  # no row needs a slice of them
        outputs_by_client = super().update_from_output(scheduler_output, model_runner_output)
        model_runner_output.logprobs = log_probs
        values = log_probs.logprobs[:, 0].tolist()
        rows = model_runner_output.req_id_to_index
        now = time.monotonic()
        starts = log_probs.cu_num_generated_tokens  # where rows have several tokens, else None
        for outputs in outputs_by_client.values():
            for output in outputs.outputs:
                request = known.get(output.request_id)
                if request is None or request.log_prob_column is None:
                    continue
                column = request.log_prob_column
                if not column:
                    request.first_token_s = now
                row = rows[output.request_id]
                start = row if starts is None else starts[row]
                column.extend(values[start : start + len(output.new_token_ids)])
                output.new_logprobs = None
                if output.finish_reason is not None:
                    more = output.kv_transfer_params or {}
                    ours = {COLUMN: column.tobytes(), WAITS: waits_of(request)}
                    output.kv_transfer_params = more | ours
        return outputs_by_client


class BlockEdges(KVCacheManager):
    """Does what vLLM's manager does for a token at which a block begins or ends. For the others
    vLLM's does nothing, after many calls.

    Of a scheduler with one group of full attention and prefix caching, without speculative
    decoding.
    """

    attention: FullAttentionManager

    @classmethod
    def use_in(cls, scheduler: Scheduler) -> FullAttentionManager | None:
        """Make a scheduler's manager one of this class, where each answer would be vLLM's. Returns
        what keeps the blocks of its attention; None: the manager stays vLLM's."""
        manager: Any = scheduler.kv_cache_manager
        groups = manager.coordinator.single_type_managers
        fits = (
            manager.enable_caching
            and len(groups) == 1
            and type(groups[0]) is FullAttentionManager
            and groups[0].kv_cache_spec.prefix_cacheable
            and groups[0].block_size == manager.block_pool.hash_block_size
            and scheduler.num_spec_tokens == 0
            and scheduler.num_lookahead_tokens == 0
        )
        if not fits:
            return None
        # vLLM's scheduler has no place where another class of manager can be named.
        manager.__class__ = cls
        manager.attention = groups[0]
        return groups[0]

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> KVCacheBlocks | None:
        """As vLLM's. Nothing is new for one more token that has its slot and fills no block."""
        is_running = new_computed_blocks is None
        if is_running and num_new_tokens == 1:
            attention = self.attention
            size = attention.block_size
            name = request.request_id
            place = request.num_computed_tokens
            has_slot = place < len(attention.req_to_blocks.get(name, ())) * size
            known_tokens = min(place + 1, request.num_tokens)
            if has_slot and known_tokens // size <= attention.num_cached_block.get(name, 0):
                return self.empty_kv_cache_blocks
        return super().allocate_slots(
            request, num_new_tokens, num_new_computed_tokens, new_computed_blocks, *args, **kwargs
        )

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """As vLLM's. Nothing is to be done where all full blocks are cached."""
        full_blocks = num_computed_tokens // self.attention.block_size
        if full_blocks > self.attention.num_cached_block.get(request.request_id, 0):
            super().cache_blocks(request, num_computed_tokens)


class ReplicaScheduler(LogProbColumns):
    """The scheduler of a replica whose device waits for each step's tokens, as a CPU does.

    Most rows of a step are plain: one token is added, and neither the response nor a block ends.
    They are done here, in a few statements; vLLM's own method, which looks at whatever a row may
    need, does the others. With `rollout.speculation` no row is plain.
    """

    speculation: SpeculationTrials | None = None
    """None: the engine never speculates, or always."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if RETURN_EXPERTS in self.vllm_config.additional_config:
            self.aux_output_connector = AuxOutputSchedulerConnector()
        if TRY_SPECULATION in self.vllm_config.additional_config:
            self.speculation = SpeculationTrials(
                self.num_spec_tokens, self.max_num_running_reqs, logger.info
            )
            # It proposes as many tokens for a batch of any size, or fails.
            self.drops_drafts = self.vllm_config.speculative_config.method == "suffix"
            if not self.drops_drafts:
                self.dynamic_sd_lookup = self.speculation.draft_tokens_by_rows
        self.attention: Any = BlockEdges.use_in(self)
        self.has_plain_rows = (
            self.attention is not None
            and not self.return_sampling_mask
            and self.connector is self.ec_connector is self.aux_output_connector is None
            and self.perf_metrics is None
        )
        self.is_async = isinstance(self, AsyncScheduler)
        self.schedules_plain_rows = (
            self.has_plain_rows
            and self.num_sampled_tokens_per_step == 1
            and self.num_prefill_lookahead <= 1
            and not self.use_pp
            and not self.defer_block_free
            and not self.need_mamba_block_aligned_split
            and self.dynamic_sd_lookup is None
        )

    def add_request(self, request: Any) -> None:
        """Take a request."""
        super().add_request(request)
        params = request.sampling_params
        request.may_be_plain = (
            self.has_plain_rows
            and request.log_prob_column is not None
            and request.structured_output_request is None
            and request.trace_headers is None
            and params.repetition_detection is None
            and not (request.resumable or request.mm_features)
        )
        if request.may_be_plain:
            request.end_tokens = {params.eos_token_id, *(params.stop_token_ids or ())}
            longest_response = request.num_prompt_tokens + request.max_tokens
            request.longest = min(longest_response, self.max_model_len)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """What vLLM's own method returns. Where each running row gets one more token and no other
        row can begin, vLLM schedules a step without rows, and the rows are added to it."""
        rows = None if throttle_prefills else self._rows_of_one_token()
        at_edges = None if rows is None else self._rows_at_edges(rows)
        if at_edges is None:
            return super().schedule(throttle_prefills)
        new_blocks = {}
        for row in at_edges:
            blocks = self.kv_cache_manager.allocate_slots(row, 1)
            assert blocks is not None, "there were enough free blocks"
            new_blocks[row.request_id] = blocks.get_block_ids(allow_none=True)
        known = set() if self.use_v2_model_runner else set(self.prev_step_scheduled_req_ids)
        running, places = self.running, self.max_num_active_reqs
        self.running, self.max_num_active_reqs = [], 0
        try:
            step = super().schedule()
        finally:
            self.running, self.max_num_active_reqs = running, places
        if rows:
            self._add_rows(step, rows, new_blocks)
            if not self.use_v2_model_runner:
                self._name_tokens(step, rows, known)
        return step

    def _rows_of_one_token(self) -> list[Any] | None:
        """The running rows that get one more token in the next step. None: there is more to
        decide."""
        count = len(self.running)
        limit = min(self.max_num_scheduled_tokens, self.scheduler_config.max_num_batched_tokens)
        if not self.schedules_plain_rows or self._pause_state is PauseState.PAUSED_ALL:
            return None
        if count > limit or self.kv_holding_waiting or self._can_admit(count):
            return None
        rows = []
        next_step = self.current_step + 1
        running: list[Any] = self.running
        for row in running:
            placeholders = row.num_output_placeholders
            computed = row.num_computed_tokens
            last_place = row.num_prompt_tokens + row.max_tokens - 2
            if placeholders and computed - placeholders >= last_place:
                continue  # its last token is on its way
            is_next = len(row._all_token_ids) + placeholders - computed == 1
            if (
                not is_next
                or not row.may_be_plain
                or row.is_prefill_chunk
                or row.spec_token_ids
                or computed + 1 >= self.max_model_len
                or next_step < row.next_decode_eligible_step
            ):
                return None
            rows.append(row)
        return rows

    def _rows_at_edges(self, rows: list[Any]) -> list[Any] | None:
        """Those of whose next tokens a block begins or ends, see `BlockEdges`. None: there are too
        few free blocks for them."""
        attention = self.attention
        size = attention.block_size
        at_edges = []
        new_blocks = 0
        for row in rows:
            name = row.request_id
            place = row.num_computed_tokens
            has_slot = place < len(attention.req_to_blocks.get(name, ())) * size
            new_blocks += not has_slot
            known_tokens = min(place + 1, len(row._all_token_ids))
            fills_block = known_tokens // size > attention.num_cached_block.get(name, 0)
            if fills_block or not has_slot:
                at_edges.append(row)
        free_blocks = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return at_edges if new_blocks <= free_blocks else None

    def _can_admit(self, running: int) -> bool:
        """Whether a waiting request may begin beside so many running rows."""
        if not self.waiting or self._pause_state is not PauseState.UNPAUSED:
            return False
        return running + self.num_waiting_for_streaming_input < self.max_num_active_reqs

    def _add_rows(self, step: SchedulerOutput, rows: list[Any], new_blocks: dict) -> None:
        """Add rows of one token to a step, and count that token as scheduled."""
        names = [row.request_id for row in rows]
        cached = step.scheduled_cached_reqs
        cached.req_ids = names
        cached.new_block_ids = [new_blocks.get(name) for name in names]
        cached.num_computed_tokens = [row.num_computed_tokens for row in rows]
        cached.num_output_tokens = [
            len(row._output_token_ids) + row.num_output_placeholders for row in rows
        ]
        step.num_scheduled_tokens = dict.fromkeys(names, 1)
        step.total_num_scheduled_tokens = len(rows)
        for row in rows:
            row.num_computed_tokens += 1
            row.num_in_flight_tokens += 1
        if self.is_async:
            self._expect_tokens(rows)

    def _name_tokens(self, step: SchedulerOutput, rows: list[Any], known: set[str]) -> None:
        """Tell vLLM's first model runner all tokens of the rows that were not in the step before;
        `known` are the others."""
        fresh = [row for row in rows if row.request_id not in known]
        tokens = {row.request_id: row.all_token_ids.copy() for row in fresh}
        step.scheduled_cached_reqs.all_token_ids = tokens
        self.prev_step_scheduled_req_ids = set(step.num_scheduled_tokens)

    def _expect_tokens(self, rows: list[Any]) -> None:
        """What `AsyncScheduler` notes of rows whose tokens are on their way."""
        scheduler: Any = self
        next_step = self.current_step + scheduler.decode_stagger
        for row in rows:
            row.num_output_placeholders += 1
            row.spec_token_ids = scheduler._spec_token_placeholders
            if self.use_v2_model_runner:
                row.next_decode_eligible_step = next_step

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause or resume."""
        super().set_pause_state(pause_state)
        if self.speculation is not None:
            self.speculation.interrupt()

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take the draft tokens of the next step, where they pay."""
        if self.speculation is not None and self.drops_drafts:
            rows = len(draft_token_ids.req_ids)
            if not self.speculation.draft_tokens_by_rows[rows]:
                nothing: list[list[int]] = [[] for _ in range(rows)]
                draft_token_ids = DraftTokenIds(draft_token_ids.req_ids, nothing)
        super().update_draft_token_ids(draft_token_ids)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """What vLLM's own method returns; the plain rows come after the others."""
        outputs = self._update_from_output(scheduler_output, model_runner_output)
        if self.speculation is not None:
            scheduled = scheduler_output.num_scheduled_tokens
            drafts = scheduler_output.scheduled_spec_decode_tokens.values()
            tokens = sum(map(len, model_runner_output.sampled_token_ids))
            is_decoding = sum(scheduled.values()) == len(scheduled) + sum(map(len, drafts))
            self.speculation.end_step(len(scheduled), tokens, is_decoding, bool(self.running))
        return outputs

    def _update_from_output(self, scheduler_output: Any, made: Any) -> dict[int, Any]:
        is_special = made.logprobs is None or not made.sampled_token_ids or made.num_nans_in_logits
        if is_special or not self.has_plain_rows:
            return super().update_from_output(scheduler_output, made)
        others, plain = self._append_to_plain_rows(scheduler_output, made)
        rest = copy.copy(scheduler_output)
        rest.num_scheduled_tokens = others
        outputs_by_client = super().update_from_output(rest, made)
        for client, outputs in plain.items():
            outputs_by_client.setdefault(client, EngineCoreOutputs()).outputs.extend(outputs)
        return outputs_by_client

    def _append_to_plain_rows(
        self, scheduled: Any, made: Any
    ) -> tuple[dict[str, int], dict[int, list[EngineCoreOutput]]]:
        """The rows that are not plain, with their scheduled tokens; and the outputs of the plain
        ones, by client."""
        values = made.logprobs.logprobs[:, 0].tolist()
        requests: dict[str, Any] = self.requests
        others: dict[str, int] = {}
        plain: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        for name, count in scheduled.num_scheduled_tokens.items():
            row = made.req_id_to_index[name]
            tokens = made.sampled_token_ids[row]
            request = requests.get(name)
            has_one_token = count == len(tokens) == 1
            if request is None or not has_one_token or not self._is_plain(request, tokens[0]):
                others[name] = count
                continue
            request.num_in_flight_tokens -= 1
            if self.is_async:
                request.num_output_placeholders -= 1
            # Not its own method, which also looks for a block to hash.
            request._output_token_ids.append(tokens[0])
            request._all_token_ids.append(tokens[0])
            request.log_prob_column.append(values[row])
            plain[request.client_index].append(EngineCoreOutput(name, tokens))
        return others, plain

    def _is_plain(self, request: Any, token: int) -> bool:
        """Whether a row's only token is nothing but one more: it ends neither the response nor a
        block, and nothing else is to be told to the client."""
        if not request.may_be_plain:
            return False
        attention = self.attention
        length = len(request._all_token_ids) + 1
        computed = request.num_computed_tokens - request.num_output_placeholders + self.is_async
        return (
            length < request.longest
            and length % attention.block_size != 0
            and token not in request.end_tokens
            and request.prefill_stats is None  # told with the first token
            and not request.num_stale_output_tokens  # of before it was preempted
            and not request.events
            and computed // attention.block_size
            <= attention.num_cached_block.get(request.request_id, 0)
        )


class PrefixesPerVersion(ReplicaScheduler):
    """Salts each request's prefix with the number of the pause after which it begins. A request
    that waits without any computed token begins after the next one.

    vLLM hashes the salt into the first block of a prompt, and each block's hash into the next.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ended_pauses = 0

    def add_request(self, request: Any) -> None:
        """Take a request, which begins with the weights of now unless it has to wait."""
        self._salt(request)
        super().add_request(request)

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause or resume. What begins after a pause has other weights than what began before."""
        super().set_pause_state(pause_state)
        if pause_state is not PauseState.UNPAUSED:
            return
        self.ended_pauses += 1
        for request in self.requests.values():
            # A preempted one keeps its salt: the tokens that it has are of older weights.
            if request.num_computed_tokens == 0 and request.num_preemptions == 0:
                self._salt(request)

    def _salt(self, request: Any) -> None:
        own_salt = vars(request).setdefault("own_salt", request.cache_salt or "")
        request.cache_salt = f"{self.ended_pauses}.{own_salt}"
        request.block_hashes.clear()
        request.update_block_hashes()


class AsyncReplicaScheduler(ReplicaScheduler, AsyncScheduler):
    """The scheduler of a replica that schedules ahead of its GPU."""


class AsyncPrefixesPerVersion(PrefixesPerVersion, AsyncScheduler):
    """The same with `weight_sync.in_flight=keep`."""


def replica_scheduler(vllm_config: VllmConfig, **arguments: Any) -> ReplicaScheduler:
    """The scheduler of a replica. vLLM decides late whether it schedules ahead of the device."""
    is_async = vllm_config.scheduler_config.async_scheduling
    scheduler_class = AsyncReplicaScheduler if is_async else ReplicaScheduler
    return scheduler_class(vllm_config=vllm_config, **arguments)


def prefixes_per_version(vllm_config: VllmConfig, **arguments: Any) -> PrefixesPerVersion:
    """The same with `weight_sync.in_flight=keep`."""
    is_async = vllm_config.scheduler_config.async_scheduling
    scheduler_class = AsyncPrefixesPerVersion if is_async else PrefixesPerVersion
    return scheduler_class(vllm_config=vllm_config, **arguments)
