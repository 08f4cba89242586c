"""What the anthropic SDK asks and understands. Arguments: base URL with /v1, key of an episode."""

import asyncio
import sys

from anthropic import AsyncAnthropic, AuthenticationError, PermissionDeniedError, beta_async_tool

QUESTION = [{"role": "user", "content": "What is 12 * 13?"}]
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOLS = [{"name": "calculator", "description": "A product.", "input_schema": SCHEMA}]


@beta_async_tool
async def calculator(expression: str) -> str:
    """Work out a product.

    Args:
        expression: Numbers with * between them.
    """
    return "156"


async def messages(client: AsyncAnthropic) -> None:
    for _ in range(8):
        answer = await client.messages.create(
            model="claude", max_tokens=48, messages=QUESTION, tools=TOOLS, system="Answer."
        )
        assert answer.usage.input_tokens > 5 and answer.usage.output_tokens > 0
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "156"}
            for block in answer.content
            if block.type == "tool_use"
        ]
        assert bool(results) == (answer.stop_reason == "tool_use")
        history = [
            *QUESTION,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": results or "Sure?"},
        ]
        longer = await client.messages.create(
            model="policy", max_tokens=8, messages=history, tools=TOOLS, system="Answer."
        )
        # The recorded answer is in the context, token for token.
        known = answer.usage.input_tokens + answer.usage.output_tokens
        assert longer.usage.input_tokens > known


async def streamed_messages(client: AsyncAnthropic) -> None:
    async with client.messages.stream(
        model="policy", max_tokens=48, messages=QUESTION, tools=TOOLS
    ) as stream:
        kinds = [event.type async for event in stream]
        assert kinds[0] == "message_start" and kinds[-1] == "message_stop", kinds
        assert (await stream.get_final_message()).usage.output_tokens > 0


async def tool_runner(client: AsyncAnthropic) -> None:
    """Its message threads are refused, and it goes on with whole histories."""
    for _ in range(4):
        runner = client.beta.messages.tool_runner(
            model="policy",
            max_tokens=48,
            tools=[calculator],
            messages=QUESTION,
            max_iterations=3,
        )
        assert (await runner.until_done()).content is not None


async def main() -> None:
    base_url = sys.argv[1].removesuffix("/v1")
    async with AsyncAnthropic(base_url=base_url, api_key=sys.argv[2]) as client:
        count = await client.messages.count_tokens(model="policy", messages=QUESTION)
        assert count.input_tokens > 5
        await messages(client)
        await streamed_messages(client)
        await tool_runner(client)
        stranger = client.with_options(api_key="ose-0-x")
        try:
            await stranger.messages.create(model="policy", max_tokens=8, messages=QUESTION)
        except (AuthenticationError, PermissionDeniedError):
            return
        raise AssertionError("a wrong key was accepted")


if __name__ == "__main__":
    asyncio.run(main())
