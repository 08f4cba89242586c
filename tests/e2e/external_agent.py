"""An agent of the tests that knows only the endpoint's URL: Python's standard library, no package
of ours. As functions, and as a program."""

import asyncio
import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
TRIES = 60
PAUSE_S = 0.6  # between two turns, longer than training, so that a fault finds episodes open
LONG_PAUSE_S = 1.5  # longer than a step of a tiny model


def post(url: str, key: str, content: dict) -> dict:
    """An answer of the endpoint. A request that was lost, or came too early, is sent again."""
    problem = ""
    for retry in range(TRIES):
        headers = {
            "Authorization": f"Bearer {key}",
            "Content-Type": "application/json",
            "x-stainless-retry-count": str(retry),
        }
        request = urllib.request.Request(url, json.dumps(content).encode(), headers)
        try:
            with OPENER.open(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as e:
            problem = f"{e.code}: {e.read().decode()}"
            if e.code < 500 and e.code != 429:
                break
        except OSError as e:
            problem = str(e)
        time.sleep(0.25)
    raise RuntimeError(problem)


def chat(base_url: str, key: str, messages: list) -> str:
    """A turn of the policy, which is appended to the messages."""
    content = {"model": "any", "messages": messages, "max_tokens": 8}
    message = post(f"{base_url}/chat/completions", key, content)["choices"][0]["message"]
    messages.append(message)
    return message["content"] or ""


def converse(row: dict, base_url: str, api_key: str) -> float:
    """Two turns. The reward is the share of digits in both."""
    messages = list(row["messages"])
    text = chat(base_url, api_key, messages)
    time.sleep(PAUSE_S)
    messages.append({"role": "user", "content": "Again."})
    text += chat(base_url, api_key, messages)
    print(f"it said {text!r}")
    return sum(map(str.isdigit, text)) / max(1, len(text))


async def in_task(row: dict, base_url: str, api_key: str) -> float:
    """The same as a coroutine."""
    return await asyncio.to_thread(converse, row, base_url, api_key)


async def over_several_steps(row: dict, base_url: str, api_key: str) -> float:
    """Three turns. Every fourth row waits between them while the others fill steps. The reward is
    the share of letters."""
    messages = list(row["messages"])
    text = await asyncio.to_thread(chat, base_url, api_key, messages)
    for _ in range(2):
        if row["id"][1] % 4 == 0:
            await asyncio.sleep(LONG_PAUSE_S)
        messages.append({"role": "user", "content": "Again."})
        text += await asyncio.to_thread(chat, base_url, api_key, messages)
    return sum(map(str.isalpha, text)) / max(1, len(text))


async def some_hang(row: dict, base_url: str, api_key: str) -> float:
    """Every fourth row hangs: half of these before the first turn, the others after it."""
    number = row["id"][1]
    if number % 4:
        return await in_task(row, base_url, api_key)
    if number % 8:
        await asyncio.to_thread(chat, base_url, api_key, list(row["messages"]))
    await asyncio.sleep(3600)
    raise AssertionError("nobody ended it")


def main() -> None:
    """As a program: one episode, or `fleet FOLDER`: those that the endpoint of a run offers."""
    if sys.argv[1:2] == ["fleet"]:
        work_for(Path(sys.argv[2]))
        return
    base_url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    reward = converse(json.load(sys.stdin), base_url, key)
    url = f"{base_url}/episodes/{key}/reward"
    post(url, key, {"reward": reward})


def work_for(folder: Path) -> None:
    """Work on one episode after another, as long as the run lasts."""
    path = folder / "endpoint.json"
    while not path.exists():
        time.sleep(0.1)
    endpoint = json.loads(path.read_text())
    url = f"{endpoint['base_url']}/v1/episodes"
    headers = {"Authorization": f"Bearer {endpoint['service_key']}"}
    while True:
        try:
            request = urllib.request.Request(f"{url}/next?wait=5", headers=headers)
            with OPENER.open(request, timeout=60) as answer:
                work = json.load(answer) if answer.status == 200 else None
        except OSError:
            time.sleep(0.5)
            continue
        if work:
            key = work["key"]
            try:
                reward = converse(work["row"], f"{work['base_url']}/v1", key)
                post(f"{url}/{key}/end", key, {"reward": reward})
            except RuntimeError as e:  # its replica has ended
                print(e, file=sys.stderr)


if __name__ == "__main__":
    main()
