"""The anthropic SDK: its tool runner asks, calls the tool and asks again."""

import math

from anthropic import AsyncAnthropic, beta_async_tool


@beta_async_tool
async def calculator(expression: str) -> str:
    """Work out a product.

    Args:
        expression: Numbers with * between them.
    """
    return str(math.prod(map(int, expression.split("*"))))


async def run(row: dict, base_url: str, api_key: str) -> None:
    async with AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as client:
        runner = client.beta.messages.tool_runner(
            model="policy",
            max_tokens=64,
            tools=[calculator],
            messages=row["messages"],
            max_iterations=3,
        )
        await runner.until_done()
