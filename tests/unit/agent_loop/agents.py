"""Agents of the tests: functions, and a program when run. Only Python's standard library."""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.parse
import urllib.request

PROXYLESS = urllib.request.build_opener(urllib.request.ProxyHandler({}))


END = "<|im_end|>"
MORE = " And why do you think so, and not otherwise?"


def post(base_url: str, key: str, path: str, content: dict) -> dict:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{base_url}/{path}", json.dumps(content).encode(), headers, method="POST"
    )
    with PROXYLESS.open(request, timeout=60) as answer:
        return json.load(answer)


def ask(base_url: str, key: str, text: str) -> str:
    """One turn of the policy."""
    content = {"messages": [{"role": "user", "content": text}]}
    answer = post(base_url, key, "chat/completions", content)
    return answer["choices"][0]["message"]["content"]


def plain(row: dict, base_url: str, api_key: str) -> dict:
    """Rewards the policy for the row's ground truth."""
    text = ask(base_url, api_key, row["prompt"])
    print(f"the policy said {text}")
    return {"right": float(row["ground_truth"] in text), "length": 0.25}


async def coroutine(row: dict, base_url: str, api_key: str) -> float:
    text = await asyncio.to_thread(ask, base_url, api_key, row["prompt"])
    print(f"{row['extra'].get('number')}: the policy said {text}")
    return float(row["ground_truth"] in text)


async def two_turns(row: dict, base_url: str, api_key: str) -> float:
    """Over one connection of its own; the second turn continues the first."""
    url = urllib.parse.urlsplit(base_url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    text = row["prompt"]
    for _ in range(2):
        body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api_key}"
        writer.write(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(headers.split("content-length:")[1].split()[0])
        answer = json.loads(await reader.readexactly(length))
        text += answer["choices"][0]["message"]["content"] + "<|im_end|>"
    writer.close()
    return 1.0


def count_cores(row: dict, base_url: str, api_key: str) -> int:
    ask(base_url, api_key, row["prompt"])
    return len(os.sched_getaffinity(0))


async def fails(row: dict, base_url: str, api_key: str) -> None:
    await asyncio.to_thread(ask, base_url, api_key, row["prompt"])
    print("about to fail")
    raise KeyError("no such city")


async def fails_after_its_own_limit(row: dict, base_url: str, api_key: str) -> None:
    content = {"messages": [{"role": "user", "content": row["prompt"]}], "max_tokens": 3}
    await asyncio.to_thread(post, base_url, api_key, "chat/completions", content)
    raise KeyError("no such city")


async def fails_twice_asked(row: dict, base_url: str, api_key: str) -> None:
    await asyncio.to_thread(ask, base_url, api_key, row["prompt"])
    await fails(row, base_url, api_key)


async def asks_for_ever(row: dict, base_url: str, api_key: str) -> None:
    while True:
        await asyncio.to_thread(ask, base_url, api_key, row["prompt"])


async def rewards_the_first(row: dict, base_url: str, api_key: str) -> float | None:
    """The other agents of the row end without a reward, and before it."""
    text = await asyncio.to_thread(ask, base_url, api_key, row["prompt"])
    try:
        open(row["extra"]["marker"], "x").close()
    except FileExistsError:
        return None
    await asyncio.sleep(0.3)
    return float(row["ground_truth"] in text)


async def leaves_a_task(row: dict, base_url: str, api_key: str) -> float:
    """That asks again and again."""
    await asyncio.to_thread(ask, base_url, api_key, row["prompt"])
    rewards = asyncio.create_task(asks_for_ever(row, base_url, api_key))
    TASKS.append(rewards)
    await asyncio.sleep(0.1)
    return 1.0


TASKS: list = []


def exits_in_its_function(row: dict, base_url: str, api_key: str) -> float:
    ask(base_url, api_key, row["prompt"])
    os._exit(int(row["extra"]["code"]))


async def hangs(row: dict, base_url: str, api_key: str) -> None:
    await asyncio.to_thread(ask, base_url, api_key, row["prompt"])
    await asyncio.sleep(3600)


async def asks_nobody(row: dict, base_url: str, api_key: str) -> None:
    await asyncio.sleep(3600)


async def stubborn(row: dict, base_url: str, api_key: str) -> float:
    """The first time it ignores its cancellation, and blocks the process."""
    marker = row["extra"]["pids"]
    await asyncio.to_thread(ask, base_url, api_key, row["prompt"])
    if not os.path.exists(marker):
        with open(marker, "w") as file:
            file.write(str(os.getpid()))
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            time.sleep(3600)
    return float(os.getpid())


def plain_hangs(row: dict, base_url: str, api_key: str) -> None:
    """With processes that leave its session, one by a detour."""
    ask(base_url, api_key, row["prompt"])
    leave_processes(row["extra"]["pids"])
    time.sleep(3600)


def leave_processes(path: str) -> None:
    """Processes that outlive this one; their ids go into a file."""
    sleep = "import time; time.sleep(3600)"
    detour = (
        "import subprocess, sys; "
        f"p = subprocess.Popen([sys.executable, '-c', {sleep!r}], stdout=subprocess.DEVNULL, "
        "start_new_session=True); print(p.pid)"
    )
    direct = subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
    orphan = subprocess.run([sys.executable, "-c", detour], stdout=subprocess.PIPE, check=True)
    with open(path + ".part", "w") as file:
        file.write(f"{os.getpid()} {direct.pid} {orphan.stdout.decode().strip()}")
    os.rename(path + ".part", path)


def exit_with_a_message() -> None:
    print("something is wrong", file=sys.stderr)
    sys.exit(3)


def reward_and_exit(base_url: str, key: str) -> None:
    post(base_url, key, "episodes/KEY/reward", {"reward": 0.5})
    exit_with_a_message()


def die_once(marker: str) -> None:
    if not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), 9)


def talk() -> None:
    print("x" * 50)
    for number in range(100_000):
        print(f"line {number}")


def ask_on(base_url: str, key: str, text: str) -> None:
    assert ask(base_url, key, text + MORE) == ""
    post(base_url, key, "episodes/KEY/reward", {"reward": 0.5})


def ask_for_ever(*request: str) -> None:
    while True:
        ask(*request)


def main(what: str) -> None:
    """As a program: by its environment and its standard input."""
    row = json.loads(os.environ.get("EPISODE_ROW") or sys.stdin.read())
    base_url = os.environ["OPENAI_BASE_URL"]
    key = os.environ["OPENAI_API_KEY"]
    assert os.environ["ANTHROPIC_BASE_URL"] == base_url.removesuffix("/v1")
    assert os.environ["ANTHROPIC_API_KEY"] == key
    if what == "silent":
        return
    text = ask(base_url, key, row["prompt"])
    print(f"the policy said {text}", flush=True)
    actions = {
        "rewards": lambda: post(base_url, key, "episodes/KEY/reward", {"reward": 0.5}),
        "exits 3": exit_with_a_message,
        "rewards and exits 3": lambda: reward_and_exit(base_url, key),
        "gives two rewards": lambda: [
            post(base_url, key, "episodes/KEY/reward", {"reward": reward}) for reward in (0.5, 0.25)
        ],
        "gives no reward": lambda: None,
        "leaves": lambda: leave_processes(row["extra"]["pids"]),
        "hangs": lambda: (leave_processes(row["extra"]["pids"]), time.sleep(3600)),
        "killed once": lambda: die_once(row["extra"]["marker"]),
        "talks": talk,
        "asks on": lambda: ask_on(base_url, key, row["prompt"] + text + END),
        "asks on and fails": lambda: json.loads(
            ask(base_url, key, row["prompt"] + text + END + MORE)
        ),
        "asks for ever": lambda: ask_for_ever(base_url, key, row["prompt"]),
    }
    actions[what]()


if __name__ == "__main__":
    main(sys.argv[1])
