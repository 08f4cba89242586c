"""The anthropic SDK: its tool runner asks, calls the tool and asks again."""

import math

from anthropic import AsyncAnthropic, beta_async_tool

CLIENT = AsyncAnthropic(api_key="each episode has its own")


@beta_async_tool
async def calculator(expression: str) -> str:
    """Work out a product.

    Args:
        expression: Numbers with * between them.
    """
    return str(math.prod(map(int, expression.split("*"))))


async def run(row: dict, base_url: str, api_key: str) -> None:
    # with_options shares the connections.
    client = CLIENT.with_options(base_url=base_url.removesuffix("/v1"), api_key=api_key)
    runner = client.beta.messages.tool_runner(
        model="policy", max_tokens=64, tools=[calculator], messages=row["messages"]
    )
    await runner.until_done()
