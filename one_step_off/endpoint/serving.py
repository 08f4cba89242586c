"""An agent's request -> the policy's answer, by vLLM's own serving classes.

vLLM reads requests, applies the chat template, parses tool calls and writes answers. Two of its
parts are ours: its renderer, so that what the policy said before is never tokenized again
(`splicing`), and its engine, so that a request becomes a turn of an episode (`engine_client`).
"""

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import ValidationError
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

from agent_loop.episode import Episode, EpisodeOver
from one_step_off.config.schema import Config
from one_step_off.data.messages import openai_messages
from one_step_off.endpoint import requests
from one_step_off.endpoint.answers import Answer, error_answer, json_answer
from one_step_off.endpoint.call import CURRENT_CALL, Call
from one_step_off.endpoint.conversation import (
    ConversationRecord,
    RequestRefused,
    checked_messages,
    plain_messages,
)
from one_step_off.endpoint.engine_client import EpisodeEngine
from one_step_off.endpoint.parsers import reasoning_parser_name, tool_parser_name
from one_step_off.endpoint.splicing import SplicingRenderer
from one_step_off.endpoint.streams import StreamedMessage, event_of_response, text_of_stream

log = logging.getLogger(__name__)

MODEL = "policy"
"""The name under which vLLM serves the policy; requests may use any other."""

EVENTS = "text/event-stream"
TOO_LONG = "context_length_exceeded"  # OpenAI's name: some agents shorten their history then

STATUS_OF_REFUSAL = 400
STATUS_OF_LIMIT = 403  # clients do not try it again
STATUS_OF_FAILURE = 500


class _Chat(OpenAIServingChat):
    """`/v1/chat/completions`."""

    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        """See `OpenAIServingChat`."""
        return _noting_answer(await super().create_chat_completion(request, raw_request))


class _Messages(AnthropicServingMessages):
    """`/v1/messages`, which vLLM serves by way of a chat."""

    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        """See `OpenAIServingChat`."""
        return _noting_answer(await super().create_chat_completion(request, raw_request))


def _noting_answer(result: Any) -> Any:
    """The result of a chat. Puts the answer into the current call, as the client receives it."""
    if isinstance(result, ErrorResponse):
        return result
    call = CURRENT_CALL.get()
    if isinstance(result, ChatCompletionResponse):
        message = result.choices[0].message.model_dump()
        call.answer = plain_messages([message | {"role": "assistant"}])
        return result
    return _noting_events(result, call)


async def _noting_events(events: AsyncIterator[str], call: Call) -> AsyncIterator[str]:
    message = StreamedMessage()
    async for event in events:
        message.add(event)
        yield event
    call.answer = plain_messages([message.message()])


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
        online_renderer = OnlineRenderer(
            engine.model_config, renderer, request_logger=None, **common, **parsers
        )
        shared: dict[str, Any] = {"online_renderer": online_renderer, "request_logger": None}
        self.models = models
        self.chat = _Chat(client, models, "assistant", **shared, **common, **parsers)
        self.messages = _Messages(client, models, "assistant", **shared, **common, **parsers)
        self.responses = OpenAIServingResponses(client, models, **shared, **common, **parsers)
        self.completions = OpenAIServingCompletion(client, models, **shared)
        self.tokens = ServingTokens(client, models, **shared)
        self.routes: dict[str, Callable[[dict[str, Any], Call], Awaitable[Any]]] = {
            requests.CHAT: self._chat,
            requests.COMPLETIONS: self._completion,
            requests.RESPONSES: self._response,
            requests.MESSAGES: self._message,
            requests.COUNT_TOKENS: self._count_tokens,
            requests.GENERATE: self._generate,
        }

    async def answer(self, episode: Episode, path: str, body: bytes) -> Answer:
        """The answer to one request. It is whole: a request for a stream gets all its events.

        Args:
            path: one of `requests.PATHS`.
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
            content = requests.parse_body(path, body)
            call.max_tokens = requests.take_max_tokens(path, content)
            settings = self.settings | episode.prompt.chat_template_kwargs
            content = requests.prepare(path, content, MODEL, record, settings)
            answer = await self._answer(path, content, call)
        except Exception as e:
            return self._failure(path, _not_canceled(call.error or e), episode)
        finally:
            CURRENT_CALL.reset(token)
        if call.error is not None:  # the error has become an event, or an answer
            return self._failure(path, _not_canceled(call.error), episode)
        if answer.status == 200:
            call.remember()
        answer.turns = call.turns
        return answer

    async def _answer(self, path: str, content: dict[str, Any], call: Call) -> Answer:
        result = await self.routes[path](content, call)
        if isinstance(result, ErrorResponse):
            code = int(result.error.code)
            return error_answer(path, code, result.error.type, result.error.message)
        if isinstance(result, list):
            return Answer(200, EVENTS, result)
        return Answer(200, "application/json", [result])

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
            case EpisodeOver(reason="room"):
                return error_answer(path, STATUS_OF_REFUSAL, TOO_LONG, str(error))
            case EpisodeOver():
                return error_answer(path, STATUS_OF_LIMIT, f"episode_{error.reason}", str(error))
            case VLLMValidationError(parameter="input_tokens" | "input_text"):
                unit = "tokens" if error.parameter == "input_tokens" else "characters"
                refusal = episode.refuse_context(f"{error.value} {unit}")
                return error_answer(path, STATUS_OF_REFUSAL, TOO_LONG, str(refusal))
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

    # --- one method per path: an error, the JSON of an answer, or the events of a stream ---

    async def _chat(self, content: dict[str, Any], call: Call) -> Any:
        call.given = content.get("messages")
        if call.given is not None:
            checked = checked_messages(call.given, from_policy=True)
            content = content | {"messages": openai_messages(checked)}
        request = ChatCompletionRequest.model_validate(content)
        return await _json_or_events(await self.chat.create_chat_completion(request))

    async def _message(self, content: dict[str, Any], call: Call) -> Any:
        request = AnthropicMessagesRequest.model_validate(content)
        return await _json_or_events(
            await self.messages.create_messages(request), exclude_none=True
        )

    async def _count_tokens(self, content: dict[str, Any], call: Call) -> Any:
        request = AnthropicCountTokensRequest.model_validate(content)
        return await _json_or_events(await self.messages.count_tokens(request), exclude_none=True)

    async def _completion(self, content: dict[str, Any], call: Call) -> Any:
        request = CompletionRequest.model_validate(content)
        result = await self.completions.create_completion(request)
        if isinstance(result, CompletionResponse):
            call.answer_text = result.choices[0].text
        answer = await _json_or_events(result)
        if isinstance(answer, list):
            call.answer_text = text_of_stream(answer)
        return answer

    async def _generate(self, content: dict[str, Any], call: Call) -> Any:
        request = GenerateRequest.model_validate(content)
        return await _json_or_events(await self.tokens.serve_tokens(request))

    async def _response(self, content: dict[str, Any], call: Call) -> Any:
        request = ResponsesRequest.model_validate(content)
        result = await self.responses.create_responses(request)
        if isinstance(result, ErrorResponse):
            return result
        events = None
        response = result
        if not isinstance(result, ResponsesResponse):
            events = []
            async for event in result:
                events.append(event_of_response(event))
                response = getattr(event, "response", None) or response
        if isinstance(response, ResponsesResponse):
            self._note_response(response, content, call)
        if events is not None:
            return events
        return response.model_dump_json(by_alias=True).encode()

    @staticmethod
    def _note_response(response: ResponsesResponse, content: dict[str, Any], call: Call) -> None:
        call.answer = plain_messages(construct_chat_messages_with_tool_call(response.output))
        output = [item.model_dump(mode="json", exclude_none=True) for item in response.output]
        call.record.responses[response.id] = [*requests.input_items(content), *output]


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


async def _json_or_events(result: Any, exclude_none: bool = False) -> Any:
    """What a serving class returned, as an error, the bytes of JSON, or a list of events."""
    if isinstance(result, ErrorResponse):
        return result
    if hasattr(result, "model_dump_json"):
        return result.model_dump_json(exclude_none=exclude_none).encode()
    if isinstance(result, (dict, list)):
        return json.dumps(result).encode()
    return [chunk.encode() async for chunk in result]
