"""The thread that owns the model: it generates for all requests at once, and does everything else
between two forward passes.

It calls transformers' `generate` for a batch of requests. A logits processor samples a token for
each row; a stopping criterion ends the call when the engine must pause or when other requests
should join. Interrupted requests go on in the next call, from the tokens that they have, which are
then computed again.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, StoppingCriteria

from agent_loop.trajectory import Generated
from one_step_off.data.samples import PolicyVersion
from one_step_off.engines.engine import GenerationRequest
from one_step_off.engines.transformers.stop_rules import StopRules

T = TypeVar("T")

JOIN_STEPS = 16
"""Tokens after which a call ends if other requests wait. All that it has is computed again then."""

GATHER_S = 0.003
"""Seconds without a new request after which a call begins: requests come in groups."""

MAX_CONTEXT_TOKENS = 32_768
"""Tokens of all contexts of a call, which are computed in one forward pass: jobs, the heartbeat
among them, wait for its end."""

PADDING = 0
"""A token id. It stands before shorter contexts, where attention does not look."""


class RunningRequest:
    """A request, and what it has generated."""

    def __init__(
        self, request: GenerationRequest, rules: StopRules, random: np.random.Generator
    ) -> None:
        """`random`: the request's own numbers, one for each token."""
        self.request = request
        self.rules = rules
        self.random = random
        self.answer: Future[Generated] = Future()
        self.context: list[int] = request.ids.tolist()
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.versions: list[PolicyVersion] = []
        self.added_s = self.begun_s = self.first_token_s = time.monotonic()

    @property
    def is_open(self) -> bool:
        """Whether it is neither answered nor cancelled."""
        return not self.answer.done()

    @property
    def final_length(self) -> int:
        """Tokens of the context and the longest answer."""
        return len(self.context) + self.request.max_tokens

    @property
    def missing_tokens(self) -> int:
        """Tokens that may still come."""
        return self.request.max_tokens - len(self.tokens)

    def append(self, token: int, log_prob: float, version: PolicyVersion) -> None:
        """Take the next token; the last one answers the request."""
        if not self.tokens:
            self.first_token_s = time.monotonic()
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self.versions.append(version)
        reason = self.rules.finish_reason(self.tokens, self.request.max_tokens)
        if reason:
            self._finish(reason)

    def fail(self, error: BaseException) -> None:
        """Let its caller raise this."""
        with suppress(InvalidStateError):  # it was cancelled
            self.answer.set_exception(error)

    def _finish(self, reason: str) -> None:
        attempts = {attempt for attempt, _ in self.versions}
        if len(attempts) > 1:
            self.fail(RuntimeError(f"weights of attempts {sorted(attempts)} made one answer"))
            return
        generated = Generated(
            np.array(self.tokens, np.int32),
            np.array(self.log_probs, np.float32),
            np.array([version for _, version in self.versions], np.int32),
            attempts.pop(),
            reason,
            queue_s=self.begun_s - self.added_s,
            prefill_s=self.first_token_s - self.begun_s,
        )
        with suppress(InvalidStateError):
            self.answer.set_result(generated)


class GenerationThread:
    """Generates for all requests, while it is not paused. It begins paused.

    Its state belongs to the thread; others call `submit`, `add` and `wake`.
    """

    def __init__(self, max_sequences: int) -> None:
        """`max_sequences`: rows of a batch at most."""
        self.max_sequences = max_sequences
        self.model: PreTrainedModel = None  # set by `use`
        self.max_cached_tokens = 0
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()
        self.requests: list[RunningRequest] = []  # by arrival
        self.held: list[RunningRequest] = []  # came after a pause that waits
        self.unfinished: set[RunningRequest] = set()  # read by others
        self.running = 0  # rows of the current call; read by others
        self.paused = True
        self.draining: Future[None] | None = None  # of a pause that waits
        self.version: PolicyVersion = (0, 0)
        self.stopped = False
        self.error: BaseException | None = None
        threading.Thread(target=self._work, name="generation", daemon=True).start()

    def use(self, model: PreTrainedModel, max_cached_tokens: int) -> None:
        """On the thread: generate with this model.

        `max_cached_tokens`: of all rows of a batch; a single row may have more.
        """
        self.model = model
        self.max_cached_tokens = max_cached_tokens
        # `generate` would take settings such as a repetition penalty from it.
        model.generation_config = GenerationConfig()

    def add(self, request: RunningRequest) -> None:
        """Generate the answer of a request; from any thread.

        Raises:
            ValueError: the model cannot answer it. Alone: in a batch it would end the engine.
        """
        vocabulary = self.model.config.get_text_config().vocab_size
        ids = request.request.ids
        is_answerable = len(ids) > 0 and request.request.max_tokens > 0
        if not is_answerable or ids.min() < 0 or ids.max() >= vocabulary:
            raise ValueError(
                f"a request of {len(ids)} tokens for {request.request.max_tokens} more: both must "
                f"be at least 1, and every token below {vocabulary}"
            )
        self.unfinished.add(request)
        self.submit(self._accept, request)
        if self.error is not None:  # it died meanwhile, and may have passed this request over
            self.unfinished.discard(request)
            request.fail(self.error)

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Call `function(*args)` between two forward passes; from any thread.

        Its future raises what the call raised, or RuntimeError: the engine died.
        """
        future: Future[T] = Future()
        self.jobs.put((future, function, args))
        if self.error is not None:
            self._refuse_jobs()
        return future

    def wake(self) -> None:
        """Let the thread look which requests were cancelled; from any thread."""
        self.submit(lambda: None)

    def pause(self, wait: bool) -> Future[None]:
        """On the thread: generate nothing more. `wait`: first finish the requests that are here.

        Returns:
            Done when nothing is generated any more.
        """
        paused = self.draining
        if paused is None or paused.done():  # done: its caller was cancelled
            paused = Future()
        self.draining = paused
        if self.paused or not wait:
            self._set_paused()
        return paused

    def resume(self, version: PolicyVersion) -> None:
        """On the thread: go on, with weights of this version."""
        self.version = version
        self.paused = False
        self.draining = None
        self.requests += self.held
        self.held = []

    def stop(self) -> None:
        """On the thread: end it. Requests that are open fail."""
        self.stopped = True

    def score(self, ids: np.ndarray) -> np.ndarray:
        """On the thread: see `Engine.score`."""
        tokens = torch.tensor(ids, dtype=torch.int64, device=self.model.device)
        logits = self.model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        log_probs = logits.float().log_softmax(-1).gather(1, tokens[1:, None])
        return log_probs[:, 0].cpu().numpy()

    def _accept(self, request: RunningRequest) -> None:
        target = self.requests if self.draining is None else self.held
        target.append(request)

    @torch.no_grad()
    def _work(self) -> None:
        error = RuntimeError("the engine was stopped")
        try:
            while not self.stopped:
                self._run_job(wait_s=0.0 if self._may_generate() else None)
                self._drop_answered()
                if self._may_generate():
                    self._gather()
                    self._generate(self._next_rows())
        except BaseException as failure:
            error = RuntimeError(f"the engine died: {type(failure).__name__}: {failure}")
            error.__cause__ = failure
        self._die(error)

    def _may_generate(self) -> bool:
        return not self.paused and not self.stopped and bool(self.requests)

    def _run_job(self, wait_s: float | None) -> bool:
        """Run the next job. Returns whether there was one.

        `wait_s`: for a job to come; None: as long as it takes.
        """
        try:
            future, function, args = self.jobs.get(wait_s != 0, wait_s)
        except queue.Empty:
            return False
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*args))
            except BaseException as error:  # the caller's
                future.set_exception(error)
        return True

    def _gather(self) -> None:
        """Wait a moment for the requests that come together with the first one."""
        while self._may_generate() and self._run_job(GATHER_S):
            pass
        self._drop_answered()

    def _drop_answered(self) -> None:
        """Forget the requests that were answered or cancelled."""
        self.requests = self._open_ones(self.requests)
        self.held = self._open_ones(self.held)
        if self.draining is not None and not self.requests:
            self._set_paused()

    def _open_ones(self, requests: list[RunningRequest]) -> list[RunningRequest]:
        """Those that are neither answered nor cancelled; the others are not `unfinished` any more.
        Each is asked once, because its caller may cancel it at any moment."""
        open_ones = []
        for request in requests:
            if request.is_open:
                open_ones.append(request)
            else:
                self.unfinished.discard(request)
        return open_ones

    def _set_paused(self) -> None:
        self.paused = True
        if self.draining is not None:
            with suppress(InvalidStateError):  # its caller was cancelled
                self.draining.set_result(None)
        self.draining = None

    def _next_rows(self) -> list[RunningRequest]:
        """The requests of the next call: by arrival, as many as the cache and one forward pass
        hold, at least one."""
        rows: list[RunningRequest] = []
        longest = 0
        longest_context = 0
        for request in self.requests:
            count = len(rows) + 1
            longest = max(longest, request.final_length)
            context = len(request.context) + len(request.tokens)
            longest_context = max(longest_context, context)
            is_full = (
                count > self.max_sequences
                or longest * count > self.max_cached_tokens
                or longest_context * count > MAX_CONTEXT_TOKENS
            )
            if rows and is_full:
                break
            rows.append(request)
        return rows

    def _generate(self, rows: list[RunningRequest]) -> None:
        """Call `generate` for these requests. It ends when all have their answers, or earlier."""
        if not self._may_generate():
            return
        batch = Batch(rows)
        self.running = len(rows)
        for row in rows:
            if not row.tokens:
                row.begun_s = time.monotonic()
        config = GenerationConfig(
            max_new_tokens=max(row.missing_tokens for row in rows),
            do_sample=False,  # the processor has chosen already
            pad_token_id=PADDING,
        )
        ids, mask = batch.contexts(self.model.device)
        self.model.generate(
            ids,
            attention_mask=mask,
            generation_config=config,
            logits_processor=[_Sampler(self, batch)],
            stopping_criteria=[_EndOfCall(self, batch)],
        )
        self.running = 0
        self._drop_answered()

    def choose_tokens(self, batch: "Batch", logits: Tensor) -> Tensor:
        """The next token of each open row; returns scores [B, V] that are 1 there, else 0.

        `logits`: float32 [B, V], which are overwritten.
        """
        places = [place for place, row in enumerate(batch.rows) if row.is_open]
        if self.paused or not places:
            return logits
        open_rows = [batch.rows[place] for place in places]
        device = logits.device
        index = torch.tensor(places, device=device)
        requests = [row.request for row in open_rows]
        temperatures = torch.tensor([request.temperature for request in requests], device=device)
        top_ps = torch.tensor([request.top_p for request in requests], device=device)
        numbers = [row.random.random() for row in open_rows]
        uniforms = torch.tensor(numbers, dtype=torch.float64, device=device)
        tokens, log_probs = sample(logits[index], temperatures, top_ps, uniforms)
        for row, token, log_prob in zip(
            open_rows, tokens.tolist(), log_probs.tolist(), strict=True
        ):
            row.append(token, log_prob, self.version)
        scores = logits.zero_()
        scores[index, tokens] = 1.0
        return scores

    def ends_call(self, batch: "Batch") -> bool:
        """After a token of each row: run the jobs that have come. Returns whether the call must
        end."""
        batch.steps += 1
        # Once paused no job may run before the call has ended: it would go on with what was
        # computed before a sync.
        while not self.paused and not self.stopped and self._run_job(0.0):
            pass
        if self.paused or self.stopped or not any(row.is_open for row in batch.rows):
            return True
        if batch.steps % JOIN_STEPS:
            return False
        self._drop_answered()
        return any(request not in batch.rows for request in self._next_rows())

    def _die(self, error: RuntimeError) -> None:
        """Fail all that waits for this thread, now and later."""
        self.error = error
        if self.draining is not None:
            with suppress(InvalidStateError):
                self.draining.set_exception(error)
        for request in list(self.unfinished):
            self.unfinished.discard(request)
            request.fail(error)
        self._refuse_jobs()

    def _refuse_jobs(self) -> None:
        with suppress(queue.Empty):
            while True:
                future, _, _ = self.jobs.get_nowait()
                if future.set_running_or_notify_cancel():
                    future.set_exception(self.error)


class Batch:
    """The requests of one call of `generate`, a row each."""

    def __init__(self, rows: list[RunningRequest]) -> None:
        self.rows = rows
        self.steps = 0

    def contexts(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """What each row continues, and which of it is no padding: int64 [B, T], [B, T]. Contexts
        end in the last column."""
        sequences = [row.context + row.tokens for row in self.rows]
        length = max(map(len, sequences))
        ids = torch.full((len(sequences), length), PADDING)
        mask = torch.zeros_like(ids)
        for place, sequence in enumerate(sequences):
            ids[place, length - len(sequence) :] = torch.tensor(sequence)
            mask[place, length - len(sequence) :] = 1
        return ids.to(device), mask.to(device)


class _Sampler(LogitsProcessor):
    """Lets the thread choose the next tokens."""

    def __init__(self, thread: GenerationThread, batch: Batch) -> None:
        self.thread = thread
        self.batch = batch

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.thread.choose_tokens(self.batch, scores)


class _EndOfCall(StoppingCriteria):
    """Lets the thread end the call, for all rows at once."""

    def __init__(self, thread: GenerationThread, batch: Batch) -> None:
        self.thread = thread
        self.batch = batch

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        ends = self.thread.ends_call(self.batch)
        return torch.full((len(self.batch.rows),), ends, device=input_ids.device)


def sample(
    logits: Tensor, temperatures: Tensor, top_ps: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample one token per row by the inverse of the cumulative distribution.

    A row's token depends on its own logits and number alone, so that a seeded request repeats
    whatever is batched with it.

    Args:
        logits: float32 [B, V].
        temperatures: float32 [B]; 0 is greedy decoding.
        top_ps: float32 [B]; a greedy row ignores it.
        uniforms: float64 [B], from [0, 1).

    Returns:
        Tokens, int64 [B], and their log-probs, float32 [B], of the distribution that was sampled
        from. Of a greedy row it is that of temperature 1.
    """
    is_greedy = temperatures == 0
    scaled = logits / temperatures.where(~is_greedy, 1.0)[:, None]
    cuts_tail = (top_ps < 1) & ~is_greedy
    if cuts_tail.any():
        scaled[cuts_tail] = _nucleus(scaled[cuts_tail], top_ps[cuts_tail])
    log_probs = scaled.log_softmax(-1)
    # In float64: the sum of a large vocabulary in float32 would move the borders between tokens.
    cumulative = log_probs.double().exp().cumsum(-1)
    targets = uniforms[:, None] * cumulative[:, -1:]
    sampled = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    sampled = sampled.clamp(max=logits.shape[1] - 1)  # a target may round up to the whole sum
    tokens = torch.where(is_greedy, logits.argmax(-1), sampled)
    return tokens, log_probs.gather(1, tokens[:, None])[:, 0]


def _nucleus(logits: Tensor, top_ps: Tensor) -> Tensor:
    """Logits [B, V] without the tokens beyond the likeliest ones that have `top_ps` [B] together.
    The likeliest token stays."""
    ascending, order = logits.sort(-1)
    cumulative = ascending.softmax(-1).cumsum(-1)
    is_cut = cumulative <= 1 - top_ps[:, None]
    is_cut[:, -1] = False
    return logits.masked_fill(is_cut.scatter(1, order, is_cut), float("-inf"))
