"""openai-agents: an Agent with a function tool, run by its Runner over the Responses API."""

import math

from agents import Agent, AgentsException, OpenAIProvider, RunConfig, Runner, function_tool


@function_tool
def calculator(expression: str) -> str:
    """Work out a product.

    Args:
        expression: Numbers with * between them.
    """
    return str(math.prod(map(int, expression.split("*"))))


AGENT = Agent(name="calculating", model="policy", tools=[calculator])


async def run(row: dict, base_url: str, api_key: str) -> None:
    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    config = RunConfig(model_provider=provider, tracing_disabled=True)
    try:
        await Runner.run(AGENT, row["messages"], run_config=config, max_turns=3)
    except AgentsException:
        pass  # a limit, or a tool that is none: what was said until then counts
