"""Splicing: a request that contains what the policy said before continues from the recorded tokens.

vLLM's renderer makes tokens of messages by the chat template. Done again for the policy's own
turns, it would give other tokens than those that were sampled: thoughts are stripped, blanks and
JSON are rewritten, and a text has more than one tokenization. So a known beginning is never
rendered again: its recorded tokens are followed by what the template writes around the new
messages.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.inputs.engine import tokens_input

from agent_loop.chat_template import TurnEncoder
from agent_loop.episode import Turn
from one_step_off.config.errors import ConfigError
from one_step_off.data.messages import knows_developer
from one_step_off.endpoint.http_server import in_thread
from one_step_off.engines.vllm.chat.conversation import (
    CURRENT_CALL,
    Call,
    RequestRefused,
    checked_messages,
    plain_messages,
)

NOT_FOR_NEW_MESSAGES = ("tools", "tokenize", "add_generation_prompt", "continue_final_message")
"""What vLLM's renderer receives besides the settings of the chat template."""

MIN_CHECKED_CHARS = 20_000
"""Shorter texts are tokenized in no time, and the episode then knows their exact length."""


class SplicingRenderer:
    """Passes for vLLM's renderer, whose attributes it has."""

    def __init__(self, renderer: Any, tokenizer: Any) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._token_chars = max(map(len, tokenizer.get_vocab()))
        self._encoder = TurnEncoder(tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    async def render_chat_async(
        self, conversations: Sequence[list[Any]], chat_params: Any, *args: Any, **kwargs: Any
    ) -> tuple[list[Any], list[Any]]:
        """Messages -> the engine's input, as vLLM's renderer returns them."""
        call = CURRENT_CALL.get()
        (messages,) = conversations
        template_kwargs = chat_params.chat_template_kwargs
        if call.given is not None:  # as the client sent them: vLLM's own checks rewrite them
            messages = call.given
        async with call.record.reading:
            checked = await in_thread(checked_messages, messages)
            ids = await in_thread(self._known_ids, call, messages, template_kwargs)
        if ids is None:
            return await self._renderer.render_chat_async([checked], chat_params, *args, **kwargs)
        return [[]], [tokens_input(ids)]

    def _known_ids(
        self, call: Call, messages: list[Any], template_kwargs: dict[str, Any]
    ) -> list[int] | None:
        """What is known of the tokens of messages without rendering them all; None: nothing."""
        call.settings = json.dumps(template_kwargs, sort_keys=True, default=str)
        call.messages = plain_messages(messages)
        ids = self._spliced(call, template_kwargs)
        if ids is None:
            own = [message.text for message in call.messages if message.role == "assistant"]
            texts = [message.text for message in call.messages if message.role != "assistant"]
            # Templates leave out some of what the policy said, of which no turn is too long.
            ids = self._too_long([*texts, max(own, key=len, default="")])
        return ids

    def _too_long(self, texts: Sequence[str]) -> list[int] | None:
        """Where texts have more characters than the engine has room for: any ids, as many as they
        have at least. To tokenize them could take minutes."""
        chars = sum(map(len, texts))
        if chars < MIN_CHECKED_CHARS:
            return None
        least = chars // self._token_chars
        return [0] * least if least > self._renderer.model_config.max_model_len else None

    def _spliced(self, call: Call, template_kwargs: dict[str, Any]) -> list[int] | None:
        """The recorded tokens and those of the new messages; None: the messages must be
        rendered."""
        if template_kwargs.get("continue_final_message"):
            return None
        found = call.record.find(call.settings, call.messages)
        if found is None:
            return None
        turn, said, new_messages = found
        too_long = self._too_long([message.text for message in new_messages])
        if too_long is not None:
            return too_long
        template = self._tokenizer.get_chat_template(tools=template_kwargs.get("tools"))
        is_moved = any(message.role == "developer" for message in new_messages)
        if is_moved and not knows_developer(template):
            return None  # it goes to the beginning of the prompt, see `messages_for`
        settings = {k: v for k, v in template_kwargs.items() if k not in NOT_FOR_NEW_MESSAGES}
        try:
            new_ids = self._encoder.encode(
                [message.message for message in new_messages],
                turn.generated.ids,
                said.message.get("tool_calls", ()),
                settings,
            )
        except ConfigError:  # the template cannot write these messages alone
            return None
        return np.concatenate([turn.ids, new_ids]).tolist()

    async def render_cmpl_async(
        self, prompts: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Sequence[Any]:
        """Prompts in text or tokens -> the engine's input, as vLLM's renderer returns it.

        Raises:
            RequestRefused: there are several prompts.
        """
        call = CURRENT_CALL.get()
        if len(prompts) != 1:
            raise RequestRefused(f"{len(prompts)} prompts in one request: send one")
        text = _text_of_prompt(prompts[0])
        if text is not None:
            call.text = text
            async with call.record.reading:
                ids = await in_thread(self._ids_of_text, call, text)
            if ids is not None:
                return [tokens_input(ids)]
        return await self._renderer.render_cmpl_async(prompts, *args, **kwargs)

    def _ids_of_text(self, call: Call, text: str) -> list[int] | None:
        """The recorded tokens that a prompt begins with, and those of the text behind them; None:
        it begins with none."""
        too_long = self._too_long([text])
        if too_long is not None:
            return too_long
        found = call.record.find_text(text)
        known = self._text_after(*found) if found else None
        if known is None:
            return None
        ids, new_text = known
        new_ids = self._tokenizer(new_text, add_special_tokens=False)["input_ids"]
        return [*ids.tolist(), *new_ids]

    def _text_after(self, turn: Turn, answer: str, text: str) -> tuple[np.ndarray, str] | None:
        """The recorded tokens of which the agent has the text, and the text behind them; None:
        these tokens cannot be told apart.

        The recorded tokens may hold more than the client received: the end of the turn, or what
        came after a stop text. Where the agent writes the same, it is theirs.
        """
        ids = turn.generated.ids
        whole = self._tokenizer.decode(ids)
        hidden = whole[len(answer) :] if whole.startswith(answer) else ""
        if text.startswith(hidden) and answer + hidden == whole:
            return turn.ids, text[len(hidden) :]
        if self._tokenizer.decode(ids[:-1]) == answer:
            return turn.ids[:-1], text
        return None


def _text_of_prompt(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return prompt
    text = prompt.get("prompt") if isinstance(prompt, dict) else None
    return text if isinstance(text, str) else None
