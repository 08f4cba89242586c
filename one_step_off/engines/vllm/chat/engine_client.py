"""The engine as vLLM's serving classes see it: a request goes to the episode that asked.

The run's sampling settings hold, whatever the request says: the trainer computes the log-probs of
exactly that distribution. What would change it in another way is refused.
"""

import copy
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from agent_loop.chat_template import TurnEncoder
from agent_loop.episode import Turn
from one_step_off.endpoint.http_server import in_thread
from one_step_off.engines.vllm.chat.conversation import CURRENT_CALL, RequestRefused
from one_step_off.engines.vllm.chat.requests import CHANGES_DISTRIBUTION

MAX_CONTEXT = 1 << 30
"""Tokens that vLLM's serving classes accept: the episode decides whether there is room for an
answer, and they would refuse the request."""


def check_sampling(params: SamplingParams) -> None:
    """Refuse what the trainer could not reproduce, or the endpoint does not give.

    Raises:
        RequestRefused: names the setting.
    """
    not_reproduced = {
        "response_format, structured outputs or a grammar": params.structured_outputs is not None,
        "logit_bias": bool(params.logit_bias),
        "allowed_token_ids": bool(params.allowed_token_ids),
        "bad_words": bool(params.bad_words),
        "min_tokens": bool(params.min_tokens),
        "ignore_eos": params.ignore_eos,
    }
    for name, asked in not_reproduced.items():
        if asked:
            raise RequestRefused(f"{name}: {CHANGES_DISTRIBUTION}")
    not_given = {
        "n > 1": params.n > 1,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "more than one log-prob per token": (params.logprobs or 0) > 1,
    }
    for name, asked in not_given.items():
        if asked:
            raise RequestRefused(f"{name}: this endpoint does not give that; leave it out")


class EpisodeEngine:
    """Passes for the `AsyncLLM` whose attributes it has; `generate` asks the current episode."""

    def __init__(self, engine: Any, tokenizer: Any) -> None:
        self._engine = engine
        self.model_config = copy.copy(engine.model_config)
        self.model_config.max_model_len = MAX_CONTEXT
        self._tokenizer = tokenizer
        self._special_ids = TurnEncoder(tokenizer).special_ids
        # The model may have more tokens than the tokenizer, and the policy samples these, too.
        self._vocabulary_size = max(engine.model_config.get_vocab_size(), len(tokenizer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncIterator[RequestOutput]:
        """The turn of the policy, whole.

        Raises:
            EpisodeOver, RequestRefused, and what the engine raises; the call's `error` holds it
            too, because the serving classes make text of it.
        """
        call = CURRENT_CALL.get()
        try:
            check_sampling(sampling_params)
            stop = sampling_params.stop or ()
            stops = (stop,) if isinstance(stop, str) else tuple(stop)
            given_ids = list(prompt["prompt_token_ids"])
            self._check_content(given_ids, stops)
            context_ids = np.asarray(given_ids, np.int32)
            limit = call.max_tokens or call.episode.max_sequence
            turn = await call.episode.turn(context_ids, limit, stops)
        except BaseException as e:
            call.error = e
            raise
        if not turn.no_room:
            call.turns.append(turn)
        yield await in_thread(self._output, turn, given_ids, sampling_params, stops, request_id)

    def _check_content(self, ids: list[int], stops: tuple[str, ...]) -> None:
        """Refuse what the engine would fail on: its failures are not taken for the agent's.

        Raises:
            RequestRefused: names the fault.
        """
        if not ids:
            raise RequestRefused("the prompt is empty: send at least one token")
        unknown = [token for token in ids if not 0 <= token < self._vocabulary_size]
        if unknown:
            raise RequestRefused(
                f"token {unknown[0]}: the model has {self._vocabulary_size} tokens"
            )
        try:
            "".join(stops).encode()
        except UnicodeEncodeError:
            raise RequestRefused("stop: is not valid Unicode") from None

    def _output(
        self,
        turn: Turn,
        context_ids: list[int],
        params: SamplingParams,
        stops: tuple[str, ...],
        request_id: str,
    ) -> RequestOutput:
        """The turn as vLLM's engine would give it."""
        ids = turn.generated.ids.tolist()
        text_ids = ids[:-1] if self._ended_by_token(turn) else ids
        text = self._tokenizer.decode(text_ids, skip_special_tokens=params.skip_special_tokens)
        text, stop_text = _cut_at_stop(text, stops, params.include_stop_str_in_output)
        log_probs = None if params.logprobs is None else self._log_probs(turn)
        completion = CompletionOutput(0, text, ids, None, log_probs)
        completion.finish_reason = turn.generated.finish_reason
        completion.stop_reason = stop_text
        return RequestOutput(request_id, None, context_ids, None, [completion], True)

    def _ended_by_token(self, turn: Turn) -> bool:
        """Whether the last token is the end of the turn, which is no text."""
        ids = turn.generated.ids
        ended = turn.generated.finish_reason == "stop"
        return ended and len(ids) > 0 and int(ids[-1]) in self._special_ids

    def _log_probs(self, turn: Turn) -> list[dict[int, Logprob]]:
        rows = []
        generated = turn.generated
        for token, log_prob in zip(generated.ids.tolist(), generated.log_probs, strict=True):
            text = self._tokenizer.decode([token])
            rows.append({token: Logprob(float(log_prob), rank=None, decoded_token=text)})
        return rows


def _cut_at_stop(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """The text up to the first of the stop texts, and that text; None: it has none of them."""
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    position, stop = min(found)
    return text[: position + len(stop) if include else position], stop
