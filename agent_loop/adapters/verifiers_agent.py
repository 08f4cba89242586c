"""Plays one task of a verifiers environment, through the project's own runner.

The variable AGENT_ENVIRONMENT names the environment as `verifiers` imports it, with settings of
the environment behind it: `gsm8k-v1?agent.harness.id=null&taskset.split=train`. As a program this
file prints tasks as data rows, one JSON object per line:

    AGENT_ENVIRONMENT=NAME python verifiers_agent.py FIRST COUNT

The policy is reached by chat completions (`EvalClientConfig`), because the endpoint itself
continues recorded tokens.
"""

import asyncio
import json
import os
import sys
from typing import Any
from urllib.parse import parse_qsl

try:
    import verifiers.v1 as vf
    from aiohttp import ClientSession, ClientTimeout, web
except ImportError as error:
    sys.exit(f"this Python has no package verifiers ({error}); pip install 'verifiers>=0.4,<0.5'")

if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())  # environments in the folder of the run

MODEL = "policy"
MAX_BODY_BYTES = 1 << 28
NOT_FORWARDED = {"host", "content-length", "transfer-encoding", "connection", "authorization"}
SESSION = "X-Session-ID"
"""The header that names the trace of a request."""


class Refused(Exception):
    """An environment that cannot be played; the message says why."""


def load(name: str) -> tuple[vf.Env, str]:
    """The environment of a name with settings, and the role in it that the policy plays.

    Raises Refused: there is none, or it cannot be played here.
    """
    ident, _, query = name.partition("?")
    try:
        config, role = _config(ident, query)
        return vf.load_environment(config), role
    except Exception as error:  # plugins may raise anything
        line = " ".join(str(error).split())
        raise Refused(f"{type(error).__name__}: {line[:600]}") from error


def _config(ident: str, query: str) -> tuple[vf.EnvConfig, str]:
    """The settings of an environment, checked by verifiers, and the policy's role.

    Raises ValueError: the policy would play several roles, or one that runs programs and has no
    place for them.
    """
    settings = _settings(query)
    settings.setdefault("taskset", {})["id"] = ident
    config = vf.resolve_env_config(settings)
    harnesses = config.agent_harnesses()
    roles = [name for name in harnesses if getattr(config, name).client is None]
    if len(roles) != 1:
        raise ValueError(
            f"the policy would play {', '.join(roles) or 'no role'} in it, and the endpoint could "
            "not tell their turns apart; give all roles but one a model of their own, with "
            "?ROLE.model=NAME&ROLE.client.base_url=URL"
        )
    role = roles[0]
    agent = settings.setdefault(role, {})
    if "runtime" not in agent:
        _require_no_programs(role, vf.load_harness(harnesses[role]))
        agent["runtime"] = {"type": "subprocess"}  # verifiers' own choice is a sandbox elsewhere
        config = vf.resolve_env_config(settings)
    return config, role


def _settings(query: str) -> dict[str, Any]:
    """`a.b=1&c=x` as {"a": {"b": 1}, "c": "x"}."""
    settings: dict[str, Any] = {}
    for path, text in parse_qsl(query, strict_parsing=bool(query)):
        *sections, key = path.split(".")
        section = settings
        for part in sections:
            section = section.setdefault(part, {})
        section[key] = _value(text)
    return settings


def _value(text: str) -> Any:
    """A number, truth value or list as in JSON; other text as it is, and "null" too: it is the name
    of a harness."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if value is None else value


def _require_no_programs(role: str, harness: vf.Harness) -> None:
    """Raises ValueError: the harness runs what the model writes, which needs a place."""
    if harness.EXECUTES_CODE or harness.NEEDS_CONTAINER:
        raise ValueError(
            f"its harness {harness.config.id!r} runs programs of the model; say where, with "
            f"?{role}.runtime.type=docker (or prime, modal, subprocess), or take the harness "
            f"without programs, with ?{role}.harness.id=null"
        )


def rows(first: int, count: int) -> list[dict[str, Any]]:
    """Tasks `first` to `first + count` of the environment, as data rows."""
    return [_row(task.data) for task in ENV.taskset.skip(first).take(count)]


def _row(data: vf.TaskData) -> dict[str, Any]:
    prompt = data.prompt or data.description or data.name or f"task {data.idx}"
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = [{"role": m.role, "content": m.content or ""} for m in prompt]
        for message in messages:
            if not isinstance(message["content"], str):
                message["content"] = json.dumps([p.model_dump() for p in message["content"]])
    if data.system_prompt:
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    return {
        "prompt": messages,
        "data_source": f"verifiers:{NAME}",
        "reward_model": {"ground_truth": str(data.idx)},
        "extra_info": {"task": data.idx},
    }


class Relay:
    """A server on loopback that gives each request the address and key of its own episode.

    All episodes so share one client of verifiers, which keeps a client for every address and key
    that it has seen.
    """

    def __init__(self) -> None:
        self.episodes: dict[str, tuple[str, str]] = {}  # of each trace: base URL and key
        self.url = ""

    async def start(self) -> None:
        self.session = ClientSession(timeout=ClientTimeout(total=None))
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/v1/{path:.*}", self.forward)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}/v1"

    async def forward(self, request: web.Request) -> web.Response:
        """Ask the endpoint, and answer as it does. Its answers are whole before they are sent."""
        base_url, key = self.episodes[request.headers[SESSION]]
        headers = {k: v for k, v in request.headers.items() if k.lower() not in NOT_FORWARDED}
        headers["Authorization"] = f"Bearer {key}"
        url = f"{base_url}/{request.match_info['path']}"
        body = await request.read()
        async with self.session.request(request.method, url, headers=headers, data=body) as answer:
            kind = answer.headers.get("Content-Type", "application/json")
            return web.Response(
                status=answer.status, body=await answer.read(), headers={"Content-Type": kind}
            )


class Player:
    """The environment while it serves, until this process ends."""

    def __init__(self) -> None:
        self.tasks: dict[int, vf.Task] = {}
        self.relay = Relay()
        self.serving = ENV.serving()

    async def start(self) -> None:
        """Begin to serve."""
        await self.relay.start()
        await self.serving.__aenter__()

    def task(self, index: int) -> vf.Task:
        """A task by its position in the taskset."""
        if index not in self.tasks:
            # A taskset yields its tasks in order, and may be endless.
            self.tasks |= {t.data.idx: t for t in ENV.taskset.take(index + 1)}
        return self.tasks[index]

    async def play(self, index: int, base_url: str, key: str) -> dict[str, float]:
        """One episode. Returns its rewards by name, weighted.

        Raises RuntimeError: the episode failed, or nothing was scored.
        """
        traces: list[str] = []

        def join(trace: vf.Trace) -> None:
            traces.append(trace.id)
            self.relay.episodes[trace.id] = (base_url, key)

        client = vf.EvalClientConfig(base_url=self.relay.url, api_key_var="NO_KEY")
        context = vf.ModelContext(MODEL, client=client)
        try:
            episode = await ENV.run_episode(self.task(index), context, on_trace=join)
        finally:
            for trace_id in traces:
                self.relay.episodes.pop(trace_id, None)
        return _rewards(episode)


def _rewards(episode: vf.Episode) -> dict[str, float]:
    """Raises RuntimeError: see `Player.play`."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors:
        lines = "; ".join(f"{error.type}: {error.message}" for error in errors)
        raise RuntimeError(f"the episode failed: {lines}")
    traces = [trace for trace in episode.traces if trace.agent.name == ROLE]
    if len(traces) != 1:
        raise RuntimeError(f"the policy played {len(traces)} times in one episode, not once")
    rewards = traces[0].rewards
    missing = [name for name, reward in rewards.items() if reward is None]
    if missing or not rewards:
        raise RuntimeError(f"not scored: {', '.join(missing) or 'the task has no rewards'}")
    return {name: reward.value for name, reward in rewards.items()}


_starting = asyncio.Lock()
_players: list[Player] = []


async def run(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """Play the task of a row. Returns its rewards by name."""
    async with _starting:
        if not _players:
            player = Player()
            await player.start()
            _players.append(player)
    return await _players[0].play(int(row["extra"]["task"]), base_url, api_key)


NAME = os.environ["AGENT_ENVIRONMENT"]
try:
    ENV, ROLE = load(NAME)
except Refused as error:
    sys.exit(str(error))

if __name__ == "__main__":
    for row in rows(*map(int, sys.argv[1:])):
        print(json.dumps(row))
