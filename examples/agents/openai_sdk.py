"""The openai SDK: chat completions in a loop, until the policy calls no tool."""

import math

from openai import AsyncOpenAI, pydantic_function_tool
from pydantic import BaseModel


class Calculator(BaseModel):
    expression: str


CLIENT = AsyncOpenAI(api_key="each episode has its own")
TOOLS = [pydantic_function_tool(Calculator, name="calculator")]


def calculate(arguments: str) -> str:
    try:
        factors = Calculator.model_validate_json(arguments).expression.split("*")
        return str(math.prod(map(int, factors)))
    except ValueError as error:  # the policy reads its mistake
        return f"error: {error}"


async def run(row: dict, base_url: str, api_key: str) -> None:
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)  # shares its connections
    messages = list(row["messages"])
    while True:
        chat = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = chat.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            text = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
