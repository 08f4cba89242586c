"""One request of an agent while it is being served."""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from agent_loop.episode import Episode, Turn
from one_step_off.engines.vllm.chat.conversation import ConversationRecord, PlainMessage


@dataclass
class Call:
    """One request, and what its parts leave for one another on the way through vLLM's classes.

    Attributes:
        record: of the episode.
        max_tokens: of the answer, as the agent asked; None: as many as there is room for.
        body_bytes: of the request.
        stream: whether the answer is sent as events.
        with_usage: whether these end with the usage.
        items: of a request of the Responses API, all up to the answer.
        settings: what the chat template was given besides the messages.
        given: the messages of a chat request, as the client sent them.
        messages: that were rendered; None where the request has no messages.
        text: that was the prompt; None where it was no text.
        answer: the policy's answer as chat messages, as the client receives it.
        answer_text: the same, of a request in plain text.
        turns: of the policy, that this request made.
        error: why the policy made none.
    """

    episode: Episode
    record: ConversationRecord
    max_tokens: int | None = None
    body_bytes: int = 0
    stream: bool = False
    with_usage: bool = False
    items: list[Any] = field(default_factory=list)
    settings: str = ""
    given: list[Any] | None = None
    messages: list[PlainMessage] | None = None
    text: str | None = None
    answer: list[PlainMessage] = field(default_factory=list)
    answer_text: str | None = None
    turns: list[Turn] = field(default_factory=list)
    error: BaseException | None = None

    def remember(self) -> None:
        """Record the turn under what led to it."""
        for turn in self.turns:
            if self.messages is not None and self.answer:
                self.record.add(self.settings, self.messages, self.answer, turn)
                turn.tool_calls = [
                    {"name": name, "arguments": arguments}
                    for message in self.answer
                    for name, arguments in message.calls
                ]
            elif self.text is not None and self.answer_text is not None:
                self.record.add_text(self.text, self.answer_text, turn)


CURRENT_CALL: ContextVar[Call] = ContextVar("CURRENT_CALL")
"""The request that the running task serves: vLLM's classes do not pass it on."""
