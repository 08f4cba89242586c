"""Plays one episode of an OpenEnv server: the policy's texts are its actions.

The variable AGENT_ENVIRONMENT is the server's URL. As a program this file prints episodes as data
rows, one JSON object per line:

    AGENT_ENVIRONMENT=URL python openenv_agent.py FIRST COUNT

Settings stand behind `#`, as in `http://HOST:8000#action=message&observation=text`:

- `action`: the field of the action that holds the policy's text; `json`: the text is the whole
  action, as a JSON object. By default the one field that the server's schema requires.
- `observation`: the field that the policy reads. By default the one text of the schema, or else all
  fields as JSON.
- `split`: the rows are the tasks of this split. By default they are seeds.
"""

import asyncio
import json
import math
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl
from urllib.request import Request, urlopen

try:
    from aiohttp import ClientError, ClientSession, ClientTimeout, ClientWebSocketResponse
except ImportError as error:
    sys.exit(f"this Python has no package aiohttp ({error}); pip install aiohttp")

EPISODE_OVER = (403, 410)
"""How the endpoint refuses a further turn."""
CONNECT_S = 10.0
STEP_S = 300.0
FREE_SESSION_S = float(os.environ.get("OPENENV_FREE_SESSION_S", "120"))
"""How long an episode waits until the server has a free session."""
MAX_MESSAGE_BYTES = 100 << 20
SHARED_FIELDS = {"done", "reward", "metadata"}
"""Fields of every action or observation, which are not the environment's own."""


class Refused(Exception):
    """The server does not do what it was asked; the message says why."""


@dataclass(frozen=True)
class Server:
    """An OpenEnv server, and how texts become actions. See the module for the settings."""

    url: str
    action: str = ""
    observation: str = ""
    split: str = ""

    @classmethod
    def parse(cls, spec: str) -> "Server":
        """Raises Refused: a setting has no such name."""
        url, _, settings = spec.partition("#")
        named = dict(parse_qsl(settings))
        unknown = named.keys() - {"action", "observation", "split"}
        if unknown:
            raise Refused(f"no setting {min(unknown)!r}; there are action, observation and split")
        return cls(url.rstrip("/"), **named)

    def with_fields(self) -> "Server":
        """The server with the fields that its schema has.

        Raises Refused: it cannot be reached, or the schema leaves a choice of actions.
        """
        schema = get_json(f"{self.url}/schema")
        action = self.action
        if not action:
            fields = _own_fields(schema["action"])
            required = [name for name in schema["action"].get("required", []) if name in fields]
            if len(required) != 1 or fields[required[0]].get("type") != "string":
                raise Refused(
                    f"its action has the fields {', '.join(fields) or '(none)'}, not one required "
                    "text; name one as #action=NAME, or let the policy write all with #action=json"
                )
            action = required[0]
        observation = self.observation
        if not observation:
            fields = _own_fields(schema["observation"])
            texts = [name for name, field in fields.items() if field.get("type") == "string"]
            observation = texts[0] if len(texts) == 1 else ""
        return replace(self, action=action, observation=observation)

    def action_of(self, text: str) -> dict[str, Any]:
        """The action that a text of the policy is. Raises ValueError: it is not a JSON object."""
        if self.action != "json":
            return {self.action: text}
        action = json.loads(text)
        if not isinstance(action, dict):
            raise ValueError("the action is not a JSON object")
        return action

    def text_of(self, observation: dict[str, Any]) -> str:
        """What the policy reads of an observation."""
        if self.observation:
            return str(observation.get(self.observation, ""))
        own = {k: v for k, v in observation.items() if k not in SHARED_FIELDS}
        return json.dumps(own)


def _own_fields(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    properties = schema.get("properties", {})
    return {name: field for name, field in properties.items() if name not in SHARED_FIELDS}


def get_json(url: str, content: dict[str, Any] | None = None) -> Any:
    """The answer to a GET, or to a POST of `content`. Raises Refused: there is none."""
    data = None if content is None else json.dumps(content).encode()
    try:
        request = Request(url, data, {"Content-Type": "application/json"})
        with urlopen(request, timeout=CONNECT_S) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:  # also a status that is not 200
        raise Refused(f"{url} gives no answer ({type(error).__name__}: {error})") from error


# --- data rows ------------------------------------------------------------------------------------


async def rows(first: int, count: int) -> list[dict[str, Any]]:
    """Episodes `first` to `first + count`, as data rows.

    Raises Refused: the server has no such split, or cannot begin an episode.
    """
    if SERVER.split:
        names = get_json(f"{SERVER.url}/list_environments")
        answer = get_json(f"{SERVER.url}/{names[0]}/num_tasks", {"split": SERVER.split})
        count = max(0, min(count, answer["num_tasks"] - first))
    async with ClientSession() as session, _session(session) as ws:
        await _ask(ws, "reset", _reset_data(first))
    return [_row(index) for index in range(first, first + count)]


def _row(index: int) -> dict[str, Any]:
    kind = f"task {SERVER.split}" if SERVER.split else "seed"
    return {
        "prompt": [{"role": "user", "content": f"{SERVER.url}, {kind} {index}"}],
        "data_source": f"openenv:{SERVER.url}",
        "reward_model": {"ground_truth": str(index)},
        "extra_info": {"task": index},
    }


def _reset_data(index: int) -> dict[str, Any]:
    if SERVER.split:
        return {"split": SERVER.split, "index": index}
    return {"seed": index}


# --- episodes -------------------------------------------------------------------------------------


@asynccontextmanager
async def _session(session: ClientSession) -> AsyncIterator[ClientWebSocketResponse]:
    """A session of the server, which is closed at the end. Raises Refused: it has none free."""
    deadline = time.monotonic() + FREE_SESSION_S
    delay = 0.1
    while True:
        try:
            ws = await asyncio.wait_for(
                session.ws_connect(f"{SERVER.url}/ws", max_msg_size=MAX_MESSAGE_BYTES), CONNECT_S
            )
        except (ClientError, TimeoutError) as error:
            raise Refused(f"{SERVER.url}/ws: {type(error).__name__}: {error}") from error
        try:
            await _ask(ws, "state")  # a server without a free session answers with an error
            break
        except Refused as error:
            await ws.close()
            if "CAPACITY_REACHED" not in str(error) or time.monotonic() > deadline:
                raise
        await asyncio.sleep(delay)
        delay = min(2 * delay, 2.0)
    try:
        yield ws
    finally:
        await ws.close()


async def _ask(ws: ClientWebSocketResponse, kind: str, data: dict[str, Any] | None = None) -> Any:
    """One message and its answer. Raises Refused: the answer is an error, or there is none."""
    message = {"type": kind} if data is None else {"type": kind, "data": data}
    try:
        await ws.send_json(message)
        answer = await ws.receive_json(timeout=STEP_S)
    except (ClientError, TypeError, ValueError, TimeoutError, ConnectionError) as error:
        raise Refused(f"{kind}: {type(error).__name__}: {error}") from error
    if answer["type"] == "error":
        details = answer["data"]
        raise Refused(f"{kind}: {details.get('code')}: {details.get('message')}")
    return answer["data"]


async def _ask_policy(
    session: ClientSession, base_url: str, key: str, messages: list[dict[str, str]]
) -> str | None:
    """The policy's next text; None: the episode has no room or time for one."""
    body = {"model": "policy", "messages": messages}
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{base_url}/chat/completions"
    async with session.post(url, json=body, headers=headers) as answer:
        if answer.status in EPISODE_OVER:
            return None
        answer.raise_for_status()
        choice = (await answer.json())["choices"][0]
        text = choice["message"]["content"] or ""
        has_room = text or choice["finish_reason"] != "length"
        return text if has_room else None


async def _post_reward(session: ClientSession, base_url: str, key: str, reward: float) -> None:
    """Send the reward so far: the agent may be killed at a limit of the run."""
    url = f"{base_url}/episodes/{key}/reward"
    async with session.post(url, json=reward, headers={"Authorization": f"Bearer {key}"}) as answer:
        if answer.status not in EPISODE_OVER:
            answer.raise_for_status()


async def run(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Play the episode of a row. Returns the sum of its steps' rewards."""
    timeout = ClientTimeout(total=None)  # the run limits the time of an episode
    async with ClientSession(timeout=timeout) as session, _session(session) as ws:
        result = await _ask(ws, "reset", _reset_data(int(row["extra"]["task"])))
        rewards: list[float] = []
        messages: list[dict[str, str]] = []
        while not result.get("done"):
            messages.append({"role": "user", "content": SERVER.text_of(result["observation"])})
            answer = await _ask_policy(session, base_url, api_key, messages)
            if answer is None:
                break
            messages.append({"role": "assistant", "content": answer})
            try:
                action = SERVER.action_of(answer)
            except ValueError:
                break  # what the policy wrote is no action
            result = await _ask(ws, "step", action)
            rewards.append(float(result.get("reward") or 0.0))
            await _post_reward(session, base_url, api_key, math.fsum(rewards))
    return math.fsum(rewards)


try:
    SERVER = Server.parse(os.environ["AGENT_ENVIRONMENT"]).with_fields()
    if __name__ == "__main__":
        for row in asyncio.run(rows(*map(int, sys.argv[1:]))):
            print(json.dumps(row))
except Refused as error:
    sys.exit(str(error))
