"""A verifiers environment: products, with a calculator as its tool. Its harness runs in-process."""

import json
import math
import random

import httpx
import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["CalculatorHarness", "ProductsTaskset"]

HTTP = httpx.AsyncClient(timeout=None)  # of all episodes; the run limits their time
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
CALCULATOR = {"name": "calculator", "description": "A product.", "parameters": PARAMETERS}


class ProductData(vf.TaskData):
    answer: str


class ProductTask(vf.Task[ProductData]):
    @vf.reward
    async def right_answer(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == f"#### {self.data.answer}")

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(trace.num_turns - 1)


class ProductsTaskset(vf.Taskset[ProductTask]):
    def load(self):
        rng = random.Random(0)
        for _ in range(4096):
            a, b = rng.randrange(10, 100), rng.randrange(10, 100)
            yield ProductTask(ProductData(prompt=f"What is {a} * {b}?", answer=str(a * b)))


class CalculatorHarness(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        _, prompt = self.resolve_text_prompt(data)
        messages = [{"role": "user", "content": prompt}]
        tools = [{"type": "function", "function": CALCULATOR}]
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=HTTP)
        for _ in range(3):
            answer = await client.chat.completions.create(
                model=ctx.model, messages=messages, tools=tools
            )
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or []:
                text = calculate(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            if not message.tool_calls:
                break
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def calculate(arguments: str) -> str:
    try:
        return str(math.prod(map(int, json.loads(arguments)["expression"].split("*"))))
    except (ValueError, TypeError, KeyError) as error:
        return f"error: {error}"
