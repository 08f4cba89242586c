"""smolagents: a ToolCallingAgent. Its answer is what the tool said, and it gives the reward."""

import asyncio
import math

from openai import DefaultHttpx2Client
from smolagents import REMOVE_PARAMETER, ChatMessage, OpenAIModel, ToolCallingAgent, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

HTTP = {"http_client": DefaultHttpx2Client()}  # of all episodes


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


async def run(row: dict, base_url: str, api_key: str) -> float:
    # "required", which it would send, constrains the policy's tokens.
    options = {"tool_choice": REMOVE_PARAMETER, "client_kwargs": HTTP}
    model = OpenAIModel("policy", base_url, api_key, **options)
    agent = Calculating([calculator], model, EMPTY_PROMPT_TEMPLATES, max_steps=1, verbosity_level=0)
    answer = await asyncio.to_thread(agent.run, row["messages"][-1]["content"])
    return float(answer == row["ground_truth"])
