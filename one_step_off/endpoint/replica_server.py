"""The endpoint of one replica: an HTTP server in the replica's event loop.

It knows the replica's episodes by their keys, and gives their requests to `Serving`. Agents reach
it through the gateway.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from agent_loop.episode import LIMITS, Episode, EpisodeOver, episode_row
from agent_loop.trajectory import Generate, Limits
from one_step_off.config.user_code import describe_error, format_traceback, log_traceback
from one_step_off.data.samples import Prompt
from one_step_off.endpoint.episodes import (
    REASONS,
    Attempt,
    CachedAnswer,
    EpisodeKeys,
    OpenEpisode,
    OpenEpisodes,
)
from one_step_off.endpoint.http_messages import (
    ANSWER,
    GATEWAY,
    NO_RETRY,
    RETRY_SOON,
    Answer,
    Refused,
    Route,
    episode_over,
    error_answer,
    error_event,
    is_streamed,
    json_answer,
    route_of,
    unknown_key,
)
from one_step_off.endpoint.http_server import (
    GuardedServer,
    HttpLimits,
    happens,
    in_thread,
    json_body,
    open_listener,
    seconds_to_wait,
    url_host,
)
from one_step_off.rewards.reward import MAX_REWARD, Reward

KEEP_ALIVE_S = 15.0
"""Seconds without a byte after which a client of a streamed answer gets a comment."""

MAX_AT_ONCE = 32
"""Requests of one episode in progress."""

SMALL_BODY = 1 << 20  # bytes of a reward or an error, and of what is hashed at once
REGISTER_S = 2.0
REGISTER_PAUSE_S = 0.02
REGISTER_TIMEOUT_S = 5.0
SETTLE_S = 1.0
POLL_S = 0.02
MAX_ERROR_CHARS = 1000

Register = Callable[[int, str, int], Awaitable[Any]]
"""Reports to the gateway a replica's index and address, and how many episodes wait for an agent."""


class AnswersRequests(Protocol):
    """`Serving`, as the server sees it."""

    async def answer(self, episode: Episode, path: str, body: bytes) -> Answer:
        """Answer one request of an agent."""
        ...


@dataclass(frozen=True)
class EndpointAccess:
    """What each replica receives of the endpoint from the driver.

    Attributes:
        base_url: of the gateway; "": agents beside the replica use the replica's own server,
            because the gateway listens on the loopback of another node.
        service_key: see `EpisodeKeys`.
        host: at which the replica's server listens; "": its node's address in the network.
        model_name: for `GET /v1/models`.
        gateway: the Ray actor.
    """

    base_url: str
    service_key: str
    host: str = "127.0.0.1"
    model_name: str = "policy"
    gateway: Any = None


class ReplicaServer:
    """The server of one replica, and what its agent loops need of it: see the module.

    Attributes:
        base_url: where agents reach it, without "/v1".
        serving: answers requests; None until the engine has started.
        address: "HOST:PORT" of this server; "" before `start`.
    """

    def __init__(
        self,
        index: int,
        access: EndpointAccess,
        max_sequence: int,
        limits: HttpLimits | None = None,
    ) -> None:
        """
        Args:
            index: of the replica.
            max_sequence: tokens of context and answer together at most.
        """
        self.index = index
        self.access = access
        self.base_url = access.base_url
        self.max_sequence = max_sequence
        self.limits = limits or HttpLimits()
        self.serving: AnswersRequests | None = None
        self.address = ""
        self.keys = EpisodeKeys(access.service_key)
        self.episodes = OpenEpisodes(self.keys, index)
        self.offers: asyncio.Queue[OpenEpisode] = asyncio.Queue()
        self._offers_changed = asyncio.Event()
        self._registering: asyncio.Task | None = None
        self._server: GuardedServer
        self._actions = {
            "policy": self._policy,
            "models": self._models,
            "next": self._next,
            "state": self._state,
            "reward": self._reward,
            "end": self._end,
            "return": self._return,
            "lost": self._lost,
        }

    @property
    def local_url(self) -> str:
        """Of this server, past the gateway."""
        return f"http://{self.address}"

    # --- for the replica and its loops ------------------------------------------------------------

    async def start(self, host: str, register: Register | None = None) -> None:
        """Listen on a free port of `host`, and keep the gateway informed of it."""
        listening = open_listener(host, 0)
        self.address = f"{url_host(host)}:{listening.getsockname()[1]}"
        self.base_url = self.base_url or f"http://{self.address}"
        self._server = GuardedServer(self._handle, self.limits)
        await self._server.listen(listening)
        if register is not None:
            self._registering = asyncio.create_task(self._keep_registered(register))

    async def stop(self) -> None:
        """End all episodes, and close the port."""
        if self._registering is not None:
            self._registering.cancel()
        if self.address:
            await self._server.stop()

    def open(self, prompt: Prompt, generate: Generate, limits: Limits) -> Episode:
        """A new episode, whose key is valid from now on."""
        return self.episodes.open(prompt, generate, limits, self.max_sequence).episode

    def close(self, episode: Episode, reason: str = "ended") -> None:
        """End an episode: requests with its key are refused, those in progress too."""
        self.episodes.close(episode.key, reason)
        if self.address:
            self._server.end_key(episode.key)

    def close_all(self, reason: str) -> None:
        """End all episodes."""
        keys = self.episodes.close_all(reason)
        for key in keys if self.address else ():
            self._server.end_key(key)

    async def offer(self, episode: Episode) -> None:
        """Give this episode to the next agent that asks for work. Returns when the agent, or its
        time limit, has ended it. The time limit counts from when the agent has received it.

        Raises:
            TimeoutError: no agent has asked within that time.
        """
        offered = self.episodes.of(episode)
        self.offers.put_nowait(offered)
        self._offers_changed.set()
        try:
            if not await happens(offered.taken, episode.seconds_left):
                seconds = f"agent.timeout_s={episode.limits.seconds:g}"
                raise TimeoutError(f"no agent asked the endpoint for work within {seconds}")
            while not offered.ended.is_set() and episode.seconds_left > 0:
                await happens(offered.ended, episode.seconds_left)
            begun = offered.answers.unfinished  # not what the agent asks for from now on
            while not (offered.ended.is_set() or all(turn.finished for turn in begun)):
                await asyncio.sleep(POLL_S)
        finally:
            offered.ended.set()

    async def _keep_registered(self, register: Register) -> None:
        """Report this server's address to the gateway, which may have been restarted."""
        while True:
            self._offers_changed.clear()
            with contextlib.suppress(Exception):
                async with asyncio.timeout(REGISTER_TIMEOUT_S):
                    await register(self.index, self.address, self.offers.qsize())
            await asyncio.sleep(REGISTER_PAUSE_S)
            await happens(self._offers_changed, REGISTER_S)

    # --- requests ---------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        route = route_of(request)
        return await self._actions[route.name](request, route)

    def _authenticate(self, request: web.BaseRequest, route: Route) -> OpenEpisode:
        """The episode of a request. Raises Refused."""
        open_episode = self.episodes.find(route.key, route.path)
        self._server.authenticate(request, "" if self._from_gateway(request) else route.key)
        return open_episode

    def _from_gateway(self, request: web.BaseRequest) -> bool:
        """Whether the gateway sent it, whose connections are those of all agents."""
        return self.keys.is_service_key(request.headers.get(GATEWAY, ""))

    async def _reply(self, request: web.BaseRequest, content: Any) -> web.StreamResponse:
        response, _ = await self._server.send(request, json_answer(200, content))
        return response

    async def _policy(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        """A request for the policy."""
        asking = self._authenticate(request, route)
        asking.asked = True
        if self.serving is None:
            raise Refused(503, "starting", "the engine is starting", route.path, RETRY_SOON)
        async with self._server.body(request, key=route.key) as body:
            read = partial(Attempt.of, route.path, body, request.headers)
            attempt = await in_thread(read) if len(body) > SMALL_BODY else read()
            cached = asking.answers.take(attempt)
            if cached is None:
                cached = self._begin(asking, route.path, body, attempt)
            cached.clients += 1
            try:
                done, _ = await asyncio.wait([cached.making], timeout=KEEP_ALIVE_S)
                if not done and await in_thread(is_streamed, body):
                    return await self._stream(request, route.path, asking, cached)
                await asyncio.wait([cached.making])
                answer = _answer_of(asking, cached, route.path)
                headers = dict(NO_RETRY) if answer.status >= 400 else {}
                if self._from_gateway(request):
                    headers[ANSWER] = str(cached.number)
                response, sent = await self._server.send(request, answer, headers)
                _mark_sent(cached, answer, sent)
                return response
            finally:
                cached.clients -= 1

    def _begin(self, asking: OpenEpisode, path: str, body: bytes, attempt: Attempt) -> CachedAnswer:
        """Begin to make an answer. Raises Refused: too many are being made."""
        if len(asking.answers.in_progress) >= MAX_AT_ONCE:
            asking.answers.refuse(attempt)
            message = f"{MAX_AT_ONCE} requests of this episode are in progress; wait for one"
            raise Refused(429, "too_many_requests", message, path, RETRY_SOON)
        making = asyncio.create_task(self._make(asking, path, body))
        cached = CachedAnswer(attempt.digest, making, retries=attempt.retries)
        asking.answers.add(cached)
        return cached

    async def _make(self, asking: OpenEpisode, path: str, body: bytes) -> Answer:
        """The answer to a request, or an error as one."""
        try:
            answer = await self.serving.answer(asking.episode, path, body)
        except EpisodeOver as over:
            answer = episode_over(path, over.reason, str(over)).answer
        except (ValueError, RecursionError) as error:
            first_line = (str(error).splitlines() or [""])[0][:MAX_ERROR_CHARS]
            answer = error_answer(path, 400, "bad_request", first_line)
        except Exception as error:
            message = f"{describe_error(error)} in the endpoint"
            if asking.engine_error is None:
                log_traceback(f"{path}, {asking.episode.name}: {message}", format_traceback(error))
            answer = error_answer(path, 500, "endpoint_error", message)
        if asking.engine_error is not None:
            name = type(asking.engine_error).__name__
            message = f"the engine failed ({name}), which ends this episode"
            answer = error_answer(path, 503, "engine_failed", message)
            asking.episode.end("engine")
            asking.ended.set()
        answer.chunks = [b"".join(answer.chunks)]  # hundreds of events take many times their bytes
        return answer

    async def _stream(
        self, request: web.BaseRequest, path: str, asking: OpenEpisode, cached: CachedAnswer
    ) -> web.StreamResponse:
        """Send comments until the answer is there, then its events. The status is sent by then, so
        that an error is an event, too."""
        head = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        if self._from_gateway(request):
            head[ANSWER] = str(cached.number)
        response = web.StreamResponse(headers=head)
        response.enable_chunked_encoding()
        sent = await self._server.write(request, response.prepare(request))
        done: set[asyncio.Future] = set()
        while sent and not done:
            sent = await self._server.write(request, response.write(b": keep-alive\n\n"))
            done, _ = await asyncio.wait([cached.making], timeout=KEEP_ALIVE_S)
        if not sent:
            return response
        answer = _answer_of(asking, cached, path)
        body = b"".join(answer.chunks)
        if answer.status >= 400:
            body = error_event(path, body)

        async def write() -> None:
            await response.write(body)
            await response.write_eof()

        _mark_sent(cached, answer, await self._server.write(request, write()))
        return response

    # --- episodes ---------------------------------------------------------------------------------

    async def _models(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        if self.keys.is_service_key(route.key):
            self._server.authenticate(request)
        else:
            self._authenticate(request, route)
        name = self.access.model_name
        model = {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "one_step_off",
            "type": "model",
            "display_name": name,
            "created_at": "1970-01-01T00:00:00Z",
        }
        listed = {"object": "list", "data": [model]}
        listed |= {"has_more": False, "first_id": name, "last_id": name}
        return await self._reply(request, listed)

    async def _state(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        episode = self._authenticate(request, route).episode
        limits = episode.limits
        return await self._reply(
            request,
            {
                "name": episode.name,
                "turns": episode.turns,
                "turns_begun": episode.turns_begun,
                "seconds_left": _finite(episode.seconds_left),
                "limits": {
                    "turns": limits.turns,
                    "turn_tokens": limits.turn_tokens,
                    "tokens": limits.tokens,
                    "sequence": episode.max_sequence,
                    "seconds": _finite(limits.seconds),
                },
                "reward": None if episode.reward is None else float(Reward.of(episode.reward)),
                "over": episode.over,
            },
        )

    async def _reward(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        """Set the reward of an episode; a later one replaces it."""
        episode = self._authenticate(request, route).episode
        async with self._server.body(request, SMALL_BODY) as body:
            reward = _reward_of(json_body(body, route.path), route.path)
        _refuse_after_end(episode, route.path)
        episode.reward = reward
        return await self._reply(request, {"reward": float(reward), "parts": reward.parts})

    async def _end(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        """End an episode."""
        ending = self._authenticate(request, route)
        async with self._server.body(request, SMALL_BODY) as body:
            content = json_body(body, route.path) if body.strip() else {}
        if not isinstance(content, dict) or set(content) - {"reward", "error"}:
            message = 'the body has other content than {"reward": ..., "error": "..."}'
            raise Refused(400, "bad_request", message, route.path)
        _refuse_after_end(ending.episode, route.path)
        if content.get("reward") is not None:
            ending.episode.reward = _reward_of(content["reward"], route.path)
        ending.episode.failure = str(content.get("error") or "")[:MAX_ERROR_CHARS]
        # The agent may be faster than the record that it has received its last answer.
        latest = time.monotonic() + SETTLE_S
        while ending.answers.busy and not ending.answers.in_progress and time.monotonic() < latest:
            await asyncio.sleep(POLL_S)
        ending.end("ended")
        return await self._reply(request, {"ended": True, "turns": ending.episode.turns})

    async def _next(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        """Give the oldest episode that is offered to an agent."""
        self._check_service_key(route)
        self._server.authenticate(request)
        offered = await self._take(seconds_to_wait(request))
        if offered is None:
            response, _ = await self._server.send(request, Answer(204, "application/json", []))
            return response
        episode = offered.episode
        content = {
            "key": episode.key,
            "base_url": self.base_url,
            "row": episode_row(episode.prompt),
        }
        sent = False
        try:
            response, sent = await self._server.send(request, json_answer(200, content))
        finally:
            if sent:
                episode.begin = time.monotonic()
                offered.taken.set()
            else:
                self._offer_again(offered)
        return response

    async def _take(self, wait_s: float) -> OpenEpisode | None:
        """The oldest episode that is offered; None: there is none within that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while True:
                    offered = await self.offers.get()
                    if not offered.ended.is_set():
                        return offered
        return None

    async def _lost(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        """The agent has not taken an answer that the gateway has taken."""
        losing = self._episode_of_gateway(request, route)
        cached = losing.answers.find(request.query.get("answer", ""))
        if cached is not None:
            cached.lose(losing.episode)
        return await self._reply(request, {"lost": cached is not None})

    async def _return(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        """The gateway could not give an episode to the agent that had asked for work."""
        returned = self._episode_of_gateway(request, route)
        if not returned.asked:
            self._offer_again(returned)
        return await self._reply(request, {"offered": not returned.asked})

    def _episode_of_gateway(self, request: web.BaseRequest, route: Route) -> OpenEpisode:
        """The episode of which the gateway speaks: it has the service key beside the episode's."""
        self._check_service_key(Route(route.name, route.path, request.headers.get("x-api-key", "")))
        return self._authenticate(request, route)

    def _offer_again(self, offered: OpenEpisode) -> None:
        self.offers.put_nowait(offered)
        self._offers_changed.set()

    def _check_service_key(self, route: Route) -> None:
        if not self.keys.is_service_key(route.key):
            raise unknown_key(route.path, bool(route.key))


def _answer_of(asking: OpenEpisode, cached: CachedAnswer, path: str) -> Answer:
    """What was made. Where the episode ended meanwhile: that it is over."""
    if not cached.making.cancelled():
        return cached.making.result()
    reason = asking.episode.over or "ended"
    message = f"this episode is over: {REASONS.get(reason, reason)}"
    return episode_over(path, reason, message).answer


def _refuse_after_end(episode: Episode, path: str) -> None:
    """Raises Refused: the agent has ended. At a limit it may still say what it has to say."""
    if episode.over and episode.over not in LIMITS:
        message = f"this episode is over: {REASONS.get(episode.over, episode.over)}"
        raise episode_over(path, episode.over, message)


def _mark_sent(cached: CachedAnswer, answer: Answer, sent: bool) -> None:
    """Record whether the client has received an answer."""
    if sent:
        cached.delivered = True
        for turn in answer.turns:
            turn.delivered = True


def _reward_of(value: Any, path: str) -> Reward:
    """A reward that an agent sent: a number, or parts by name; either may be under "reward".
    Raises Refused."""
    if isinstance(value, dict) and isinstance(value.get("reward"), dict):
        value = value["reward"]
    reward = Reward.of(value)
    if reward is None:
        message = (
            f"{value!r:.100}: no reward; send a finite number (at most {MAX_REWARD:g}), or parts "
            'by name, as {"right": 1.0, "form": 0.5}'
        )
        raise Refused(400, "bad_reward", message, path)
    return reward


def _finite(seconds: float) -> float | None:
    """JSON has no infinity."""
    return None if seconds == float("inf") else seconds
