"""An OpenEnv server: products. It works out the policy's call, and rewards a right result.

python products_openenv.py PORT
"""

import json
import math
import random
import re
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.S)


class TextAction(Action):
    message: str


class TextObservation(Observation):
    text: str


class Products(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    @property
    def state(self) -> State:
        return self._state

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> TextObservation:
        rng = random.Random(seed)
        self.a, self.b = rng.randrange(10, 100), rng.randrange(10, 100)
        self._state = State(episode_id=episode_id)
        return TextObservation(text=f"What is {self.a} * {self.b}?")

    def step(self, action: TextAction, timeout_s: float | None = None) -> TextObservation:
        self._state.step_count += 1
        call = CALL.search(action.message)
        if call is None and self._state.step_count == 1:
            return TextObservation(text=f"Call the calculator. What is {self.a} * {self.b}?")
        right = call is not None and result(call[1]) == self.a * self.b
        return TextObservation(text="", done=True, reward=float(right))


def result(call: str) -> int | None:
    try:
        return math.prod(map(int, json.loads(call)["arguments"]["expression"].split("*")))
    except (ValueError, TypeError, KeyError):
        return None


if __name__ == "__main__":
    app = create_fastapi_app(Products, TextAction, TextObservation, max_concurrent_envs=512)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
