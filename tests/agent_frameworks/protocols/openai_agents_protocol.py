"""What openai-agents asks and understands. Arguments: base URL with /v1, key of an episode."""

import asyncio
import sys

from agents import Agent, MaxTurnsExceeded, OpenAIProvider, RunConfig, Runner, function_tool


@function_tool
def calculator(expression: str) -> str:
    """Work out a product.

    Args:
        expression: Numbers with * between them.
    """
    return "156"


async def ask(agent: Agent, config: RunConfig, **options: bool) -> None:
    """One conversation, and one that is streamed."""
    options = {"run_config": config, "max_turns": 3, **options}
    try:
        result = await Runner.run(agent, "What is 12 * 13?", **options)
        assert isinstance(result.final_output, str)
        streamed = Runner.run_streamed(agent, "What is 12 * 13?", **options)
        async for _ in streamed.stream_events():
            pass
        assert isinstance(streamed.final_output, str)
    except MaxTurnsExceeded:
        pass


async def main() -> None:
    agent = Agent(name="a", instructions="Answer.", model="policy", tools=[calculator])
    for use_responses in (True, False):
        provider = OpenAIProvider(
            base_url=sys.argv[1], api_key=sys.argv[2], use_responses=use_responses
        )
        config = RunConfig(model_provider=provider, tracing_disabled=True)
        for _ in range(5):
            await ask(agent, config)
        if use_responses:
            await ask(agent, config, auto_previous_response_id=True)


if __name__ == "__main__":
    asyncio.run(main())
