"""An agent's request -> the policy's answer, by vLLM's own serving classes.

vLLM reads requests, applies the chat template, parses tool calls and writes answers. Two of its
parts are ours: its renderer, so that what the policy said before is never tokenized again
(`splicing`), and its engine, so that a request becomes a turn of an episode (`engine_client`).
"""

import asyncio
import copy
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from openai.types.responses import ResponseOutputMessage, ResponseOutputText
from pydantic import BaseModel, ValidationError
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.openai.responses.utils import construct_chat_messages_with_tool_call
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMValidationError
from vllm.renderers.online_renderer import OnlineRenderer

from agent_loop.episode import LIMITS, Episode, EpisodeOver
from one_step_off.config.schema import Config
from one_step_off.data.messages import openai_messages
from one_step_off.endpoint import http_messages
from one_step_off.endpoint.http_messages import Answer, episode_over, error_answer, json_answer
from one_step_off.endpoint.http_server import in_thread
from one_step_off.engines.vllm.chat import requests
from one_step_off.engines.vllm.chat.conversation import (
    CURRENT_CALL,
    Call,
    ConversationRecord,
    RequestRefused,
    checked_messages,
    plain_messages,
)
from one_step_off.engines.vllm.chat.engine_client import EpisodeEngine
from one_step_off.engines.vllm.chat.parsers import (
    careful_parser,
    reasoning_parser_name,
    tool_parser_name,
)
from one_step_off.engines.vllm.chat.splicing import SplicingRenderer

log = logging.getLogger(__name__)

MODEL = "policy"
"""The name under which vLLM serves the policy; requests may use any other."""

EVENTS = "text/event-stream"
TOO_LONG = "context_length_exceeded"  # OpenAI's name: some agents shorten their history then

REQUESTS: dict[str, type[BaseModel]] = {
    requests.CHAT: ChatCompletionRequest,
    requests.COMPLETIONS: CompletionRequest,
    requests.RESPONSES: ResponsesRequest,
    requests.MESSAGES: AnthropicMessagesRequest,
    requests.COUNT_TOKENS: AnthropicCountTokensRequest,
    requests.GENERATE: GenerateRequest,
}
STREAMS: dict[str, Callable[[dict[str, Any], bool], list[bytes]]] = {
    requests.CHAT: http_messages.chat_events,
    requests.COMPLETIONS: http_messages.completion_events,
    requests.RESPONSES: http_messages.response_events,
    requests.MESSAGES: http_messages.message_events,
    requests.GENERATE: http_messages.token_events,
}

MAX_CONTEXTS = 8
"""A request that is so many times too long is refused before it is tokenized. One that is less
too long gets an empty answer, cut off at its length."""

STATUS_OF_REFUSAL = 400
STATUS_OF_LIMIT = 403  # clients do not try it again
STATUS_OF_FAILURE = 500


class _Chat(OpenAIServingChat):
    """`/v1/chat/completions`. The policy's turn is read in a thread."""

    only_objects = False
    """Whether the arguments of a call must be a JSON object."""

    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        """See `OpenAIServingChat`."""
        return _noting_answer(await super().create_chat_completion(request, raw_request))

    async def chat_completion_full_generator(
        self, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """See `OpenAIServingChat`."""
        outputs = [output async for output in result_generator]
        make = super().chat_completion_full_generator
        return await in_thread(_run, make, request, outputs, args, kwargs)

    def _make_parser(self, request: Any, tokenizer: Any, chat_template_kwargs: Any) -> Any:
        parser = super()._make_parser(request, tokenizer, chat_template_kwargs)
        return careful_parser(parser, self.only_objects)


class _Messages(_Chat, AnthropicServingMessages):
    """`/v1/messages`, which vLLM serves by way of a chat."""

    only_objects = True


class _Responses(OpenAIServingResponses):
    """`/v1/responses`."""

    async def responses_full_generator(
        self, request: Any, sampling_params: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """See `OpenAIServingResponses`."""
        outputs = [output async for output in result_generator]
        make = partial(super().responses_full_generator, request, sampling_params)
        return await in_thread(_run, make, outputs, args, kwargs)

    def _make_response_output_items(self, *args: Any, **kwargs: Any) -> list[Any]:
        items = super()._make_response_output_items(*args, **kwargs)
        if not items:  # clients send back what was said, even nothing
            nothing = ResponseOutputText(text="", annotations=[], type="output_text")
            message = {"role": "assistant", "status": "completed", "type": "message"}
            items = [ResponseOutputMessage(id=f"msg_{uuid4().hex}", content=[nothing], **message)]
        return items

    def _make_response_parser(self, request: Any, tokenizer: Any, chat_template_kwargs: Any) -> Any:
        parser = super()._make_response_parser(request, tokenizer, chat_template_kwargs)
        return careful_parser(parser)


def _run(make: Callable[..., Any], *arguments: Any) -> Any:
    """What `make`, a coroutine function of vLLM, returns. It has nothing to wait for.

    Args:
        arguments: its own; then the outputs that it iterates over, its other ones, and those with
            names.
    """
    *first, outputs, args, kwargs = arguments

    async def replay() -> AsyncIterator[Any]:
        for output in outputs:
            yield output

    return asyncio.run(make(*first, replay(), *args, **kwargs))


def _noting_answer(result: Any) -> Any:
    """The result of a chat. Puts the answer into the current call."""
    if isinstance(result, ChatCompletionResponse):
        message = result.choices[0].message.model_dump()
        CURRENT_CALL.get().answer = plain_messages([message | {"role": "assistant"}])
    return result


class Serving:
    """Answers the requests of all episodes of one replica."""

    def __init__(self, cfg: Config, engine: Any, tokenizer: Any) -> None:
        """
        Args:
            engine: the replica's `AsyncLLM`.
            tokenizer: the policy's.
        """
        self.records: WeakKeyDictionary[Episode, ConversationRecord] = WeakKeyDictionary()
        self.settings = cfg.data.chat_template_kwargs
        # A policy that learns writes many broken calls; each would be a traceback in the log.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        client = EpisodeEngine(engine, tokenizer)
        renderer = SplicingRenderer(engine.renderer, tokenizer)
        tool_parser = tool_parser_name(cfg, tokenizer)
        models = OpenAIServingModels(client, [BaseModelPath(MODEL, cfg.model.path)])
        common = {
            "chat_template": None,
            "chat_template_content_format": "string",
        }
        parsers = {
            "enable_auto_tools": tool_parser is not None,
            "tool_parser": tool_parser,
            "reasoning_parser": reasoning_parser_name(cfg, tool_parser),
        }
        bounded = copy.copy(engine.model_config)
        bounded.max_model_len *= MAX_CONTEXTS
        online_renderer = OnlineRenderer(
            bounded, renderer, request_logger=None, **common, **parsers
        )
        shared: dict[str, Any] = {"online_renderer": online_renderer, "request_logger": None}
        self.models = models
        self.chat = _Chat(client, models, "assistant", **shared, **common, **parsers)
        self.messages = _Messages(client, models, "assistant", **shared, **common, **parsers)
        self.responses = _Responses(client, models, **shared, **common, **parsers)
        self.completions = OpenAIServingCompletion(client, models, **shared)
        self.tokens = ServingTokens(client, models, **shared)
        self.routes: dict[str, Callable[[Any], Awaitable[Any]]] = {
            requests.CHAT: self.chat.create_chat_completion,
            requests.COMPLETIONS: self.completions.create_completion,
            requests.RESPONSES: self.responses.create_responses,
            requests.MESSAGES: self.messages.create_messages,
            requests.COUNT_TOKENS: self.messages.count_tokens,
            requests.GENERATE: self.tokens.serve_tokens,
        }

    async def answer(self, episode: Episode, path: str, body: bytes) -> Answer:
        """The answer to one request. It is whole: a request for a stream gets all its events.

        Args:
            path: one of `http_messages.POLICY_PATHS`.
            body: of the request.
        """
        answer = await self._serve(episode, path, body)
        if answer.status >= STATUS_OF_REFUSAL:
            episode.refusal = json.loads(answer.chunks[0])["error"]["message"]
        return answer

    async def _serve(self, episode: Episode, path: str, body: bytes) -> Answer:
        record = self.records.setdefault(episode, ConversationRecord())
        call = Call(episode, record)
        token = CURRENT_CALL.set(call)
        try:
            settings = self.settings | episode.prompt.chat_template_kwargs
            async with record.reading:
                request = await in_thread(_read_request, path, body, call, settings)
            result = await self.routes[path](request)
            if isinstance(result, ErrorResponse):
                code = int(result.error.code)
                answer = error_answer(path, code, result.error.type, result.error.message)
            else:
                async with record.reading:
                    answer = await in_thread(_write_answer, path, result, call)
        except Exception as e:
            return self._failure(path, _not_canceled(call.error or e), episode)
        finally:
            CURRENT_CALL.reset(token)
        if call.error is not None:  # the error has become an answer
            return self._failure(path, _not_canceled(call.error), episode)
        if answer.status == 200:
            call.remember()
            answer.turns = call.turns
        return answer

    def _failure(self, path: str, error: BaseException, episode: Episode) -> Answer:
        """What the agent receives where the policy made no turn."""
        match error:
            case requests.ThreadRefused():
                details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
                content = {
                    "type": "invalid_request_error",
                    "message": str(error),
                    "details": details,
                }
                return json_answer(STATUS_OF_REFUSAL, {"type": "error", "error": content})
            case EpisodeOver() if error.reason in LIMITS:
                return error_answer(path, STATUS_OF_LIMIT, f"episode_{error.reason}", str(error))
            case EpisodeOver():
                return episode_over(path, error.reason, str(error)).answer
            case requests.RequestTooLong():
                return error_answer(path, STATUS_OF_REFUSAL, TOO_LONG, str(error))
            case VLLMValidationError(parameter="input_tokens" | "input_text"):
                return error_answer(path, STATUS_OF_REFUSAL, TOO_LONG, str(error))
            case RequestRefused():
                return error_answer(path, STATUS_OF_REFUSAL, "invalid_request_error", str(error))
            case ValidationError():
                line = _validation_line(error)
                return error_answer(path, STATUS_OF_REFUSAL, "invalid_request_error", line)
        response = create_error_response(error)
        status = int(response.error.code)
        if status >= STATUS_OF_FAILURE:
            log.error("%s for episode %s failed", path, episode.name, exc_info=error)
        return error_answer(path, status, response.error.type, response.error.message)


def _read_request(path: str, body: bytes, call: Call, settings: dict[str, Any]) -> BaseModel:
    """The request as vLLM's classes take it.

    Args:
        settings: of the chat template, of the run and the row.

    Raises:
        RequestRefused, ValidationError: it is none, or too long.
    """
    call.body_bytes = len(body)
    content = requests.parse_body(path, body, call.episode.max_sequence)
    call.max_tokens = requests.take_max_tokens(path, content)
    call.stream, call.with_usage = requests.take_stream(content)
    content = requests.prepare(path, content, MODEL, call.record, settings)
    if path == requests.RESPONSES:
        call.items = requests.input_items(content)
    if path == requests.CHAT and "messages" in content:
        call.given = content["messages"]
        content["messages"] = openai_messages(checked_messages(call.given))
    return REQUESTS[path].model_validate(content)


def _write_answer(path: str, result: BaseModel, call: Call) -> Answer:
    """What vLLM's classes returned, whole or as a stream."""
    if isinstance(result, CompletionResponse):
        call.answer_text = result.choices[0].text
    if isinstance(result, ResponsesResponse):
        call.answer = plain_messages(construct_chat_messages_with_tool_call(result.output))
        output = [item.model_dump(mode="json", exclude_none=True) for item in result.output]
        call.record.add_response(result.id, [*call.items, *output], call.body_bytes)
    without_none = path.startswith(requests.MESSAGES)
    content = result.model_dump(mode="json", by_alias=True, exclude_none=without_none)
    if not call.stream:
        return json_answer(200, content)
    return Answer(200, EVENTS, STREAMS[path](content, call.with_usage))


def _not_canceled(error: BaseException) -> BaseException:
    """The error. Raises it if it is a cancellation, of which vLLM's classes make an answer."""
    if isinstance(error, Exception):
        return error
    raise error


def _validation_line(error: ValidationError) -> str:
    """The first wrong field, and what it might have been: a field may have several types."""
    faults = error.errors()
    field = faults[0]["loc"][:1]
    reasons = dict.fromkeys(fault["msg"] for fault in faults if fault["loc"][:1] == field)
    return f"{'.'.join(map(str, field))}: {' or '.join(list(reasons)[:3])}"
