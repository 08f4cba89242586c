"""smolagents: a ToolCallingAgent. Its answer is what the tool said, and it gives the reward."""

import math

import openai  # noqa: F401  once, and not in the process of each episode
from smolagents import REMOVE_PARAMETER, ChatMessage, OpenAIModel, ToolCallingAgent, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES


@tool
def calculator(expression: str) -> str:
    """Work out a product.

    Args:
        expression: Numbers with * between them.
    """
    return str(math.prod(map(int, expression.split("*"))))


class Calculating(ToolCallingAgent):
    def provide_final_answer(self, task: str) -> ChatMessage:
        return ChatMessage(role="assistant", content=self.memory.steps[-1].observations)


def run(row: dict, base_url: str, api_key: str) -> float:
    # "required", which it would send, constrains the policy's tokens.
    model = OpenAIModel("policy", base_url, api_key, tool_choice=REMOVE_PARAMETER)
    agent = Calculating([calculator], model, EMPTY_PROMPT_TEMPLATES, max_steps=1, verbosity_level=0)
    return float(agent.run(row["messages"][-1]["content"]) == row["ground_truth"])
