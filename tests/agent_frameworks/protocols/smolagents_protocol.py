"""What smolagents asks and understands. Arguments: base URL with /v1, key of an episode."""

import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

FAULTS_OF_THE_MODEL = (
    None,
    "AgentParsingError",
    "AgentToolCallError",
    "AgentToolExecutionError",  # it calls a tool that does not exist
    "AgentMaxStepsError",
)
"""The tiny model writes broken calls, and may not come to an end in two steps."""


@tool
def calculator(expression: str) -> str:
    """Work out a product.

    Args:
        expression: Numbers with * between them.
    """
    return "156"


def main() -> None:
    # Its own tool_choice is "required".
    model = OpenAIModel("policy", sys.argv[1], sys.argv[2])
    for stream in (False, True):
        for _ in range(4):
            agent = ToolCallingAgent(
                [calculator],
                model,
                EMPTY_PROMPT_TEMPLATES,
                max_steps=2,
                verbosity_level=0,
                stream_outputs=stream,
            )
            answer = agent.run("What is 12 * 13?")
            assert "Error in generating" not in str(answer), answer
            for step in agent.memory.steps[1:]:
                error = step.error and type(step.error).__name__
                assert error in FAULTS_OF_THE_MODEL, step.error


if __name__ == "__main__":
    main()
