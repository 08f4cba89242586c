"""What the openai SDK asks and understands. Arguments: base URL with /v1, key of an episode."""

import asyncio
import sys

from openai import (
    AsyncOpenAI,
    AuthenticationError,
    BadRequestError,
    PermissionDeniedError,
    pydantic_function_tool,
)
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "What is 12 * 13?"}]


class Calculator(BaseModel):
    expression: str


TOOLS = [pydantic_function_tool(Calculator, name="calculator")]
FLAT_TOOLS = [{"type": "function"} | tool["function"] for tool in TOOLS]


async def chat(client: AsyncOpenAI) -> None:
    for _ in range(8):
        answer = await client.chat.completions.create(
            model="gpt-5", messages=QUESTION, tools=TOOLS, max_tokens=48
        )
        assert answer.usage.prompt_tokens > 5 and answer.usage.completion_tokens > 0
        message = answer.choices[0].message
        history = [*QUESTION, message]
        for call in message.tool_calls or []:
            history.append({"role": "tool", "tool_call_id": call.id, "content": "156"})
        history.append({"role": "user", "content": "Sure?"})
        longer = await client.chat.completions.create(
            model="policy", messages=history, tools=TOOLS, max_tokens=8
        )
        # The recorded answer is in the context, token for token.
        assert longer.usage.prompt_tokens > answer.usage.total_tokens
        if message.tool_calls:
            assert answer.choices[0].finish_reason == "tool_calls"


async def streamed_chat(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="policy",
        messages=QUESTION,
        tools=TOOLS,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage.completion_tokens > 0
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [reason for reason in reasons if reason] in (["stop"], ["tool_calls"], ["length"])


async def responses(client: AsyncOpenAI) -> None:
    create = client.responses.create
    first = await create(
        model="policy", instructions="Answer.", input="What is 12 * 13?", tools=FLAT_TOOLS
    )
    assert first.status in ("completed", "incomplete") and first.usage.output_tokens > 0
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "156"}
        for item in first.output
        if item.type == "function_call"
    ]
    following = outputs or [{"role": "user", "content": "Sure?"}]
    second = await create(
        model="policy", previous_response_id=first.id, input=following, tools=FLAT_TOOLS
    )
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    async with client.responses.stream(model="policy", input="What is 12 * 13?") as stream:
        kinds = [event.type async for event in stream]
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed", kinds
        assert (await stream.get_final_response()).output


async def completions(client: AsyncOpenAI) -> None:
    prompt = "Question: What is 12 * 13?\nAnswer:"
    answer = await client.completions.create(model="policy", prompt=prompt, max_tokens=8)
    assert 0 < answer.usage.completion_tokens <= 8
    stream = await client.completions.create(model="policy", prompt=prompt, stream=True)
    assert [chunk async for chunk in stream]


async def refusals(client: AsyncOpenAI) -> None:
    create = client.chat.completions.create
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for refused, name in [
        ({"messages": QUESTION, "n": 2}, "n"),
        ({"messages": QUESTION, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "user", "content": [image]}]}, "image"),
    ]:
        try:
            await create(model="policy", **refused)
        except BadRequestError as error:
            assert name in error.message, error.message
        else:
            raise AssertionError(f"{name} was not refused")
    try:
        stranger = client.with_options(api_key="ose-0-x")
        await stranger.chat.completions.create(model="policy", messages=QUESTION)
    except (AuthenticationError, PermissionDeniedError):
        return
    raise AssertionError("a wrong key was accepted")


async def main() -> None:
    async with AsyncOpenAI(base_url=sys.argv[1], api_key=sys.argv[2]) as client:
        assert "policy" in [model.id async for model in client.models.list()]
        await chat(client)
        await streamed_chat(client)
        await responses(client)
        await completions(client)
        await refusals(client)


if __name__ == "__main__":
    asyncio.run(main())
