"""Rewards by a model: what it reads, a real server and its failures, and the mixing with rule
rewards."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import math
import time
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from one_step_off.checkpoint import write_batch
from one_step_off.cluster.errors import RoleError
from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch, Prompt, Sample
from one_step_off.models.tiny_qwen import build_tokenizer
from one_step_off.monitoring.console import RunConsole
from one_step_off.monitoring.loggers import LogEntry, SampleDump
from one_step_off.training.reward_models import RemoteRewardModel, mix, sequences_for

real_sleep = asyncio.sleep  # retries wait shorter in these tests


PROMPT_IDS = np.array([7, 8], np.int32)


def sample(row: int, index: int = 0, reward: float = 1.0, text: str = "27") -> Sample:
    """A sample of three tokens."""
    return Sample(
        prompt_id=(0, row),
        index=index,
        prompt_ids=PROMPT_IDS,
        response_ids=np.arange(3, dtype=np.int32),
        log_probs=np.zeros(3, np.float32),
        loss_mask=np.ones(3, bool),
        versions=np.arange(3, dtype=np.int32),
        reward=reward,
        response=text,
    )


def prompt(row: int) -> Prompt:
    text = f"q{row}"
    messages = [{"role": "user", "content": text}]
    return Prompt((0, row), PROMPT_IDS, text, str(row), messages=messages)


PROMPTS = {(0, row): prompt(row) for row in range(20)}


class Server:
    """A reward server that scores each sample with the length of its response, or as `answers` has
    it."""

    def __init__(self) -> None:
        self.open_requests = 0
        self.most_open_requests = 0
        self.calls = 0
        self.bodies: list[dict] = []
        self.answers: list[object] = []  # used up first: a status, a body, or seconds to wait

    async def handle(self, request: web.Request) -> web.Response:
        self.open_requests += 1
        self.calls += 1
        self.most_open_requests = max(self.most_open_requests, self.open_requests)
        body = await request.json()
        self.bodies.append(body)
        try:
            await real_sleep(0.02)
            special = self.answers.pop(0) if self.answers else None
            if isinstance(special, int):
                return web.Response(status=special)
            if isinstance(special, float):
                await real_sleep(special)
            if isinstance(special, str):
                return web.Response(text=special, content_type="application/json")
            return web.json_response({"scores": [float(len(r)) for r in body["responses"]]})
        finally:
            self.open_requests -= 1

    @contextlib.asynccontextmanager
    async def running(self):
        app = web.Application()
        app.router.add_post("/score", self.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site: Any = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/score"
        finally:
            await runner.cleanup()


def ask(
    server: Server, samples: list[Sample], monkeypatch: pytest.MonkeyPatch, **changes: object
) -> list[float]:
    monkeypatch.setattr(
        "one_step_off.training.reward_models.asyncio.sleep", lambda s: real_sleep(min(s, 0.01))
    )

    async def main() -> list[float]:
        async with server.running() as url:
            cfg = Config()
            cfg.reward_model.url = url
            cfg.reward_model.request_size = 4
            cfg.reward_model.max_concurrency = 2
            for name, value in changes.items():
                setattr(cfg.reward_model, name, value)
            model = RemoteRewardModel(cfg, PROMPTS.get)
            return await model.rewards(Batch(3, samples, (0, 0)))

    return asyncio.run(main())


def test_scores_come_back_in_order_and_few_requests_are_open(monkeypatch):
    server = Server()
    samples = [sample(row, text="x" * (row + 1)) for row in range(18)]
    assert ask(server, samples, monkeypatch) == [float(row + 1) for row in range(18)]
    assert server.calls == 5
    assert server.most_open_requests == 2
    whole = {
        k: [x for body in server.bodies for x in body[k]]
        for k in ("prompts", "responses", "ground_truths")
    }
    assert sorted(whole["prompts"]) == sorted(f"q{row}" for row in range(18))
    assert dict(zip(whole["prompts"], whole["ground_truths"], strict=True))["q5"] == "5"


@pytest.mark.parametrize(
    "bad",
    [
        500,
        "no json",
        json.dumps({"scores": [1.0]}),
        json.dumps({"scores": [1, 2, None, 4]}),
        "{}",
        '{"scores": [1,2,3,NaN]}',
    ],
)
def test_what_fails_once_is_asked_again(monkeypatch, bad):
    server = Server()
    server.answers = [bad]
    assert ask(server, [sample(row) for row in range(4)], monkeypatch) == [2.0] * 4
    assert server.calls == 2


def test_after_the_last_try_it_says_which_step_and_server(monkeypatch):
    server = Server()
    server.answers = [503] * 3
    samples = [sample(0)]
    (score,) = ask(server, samples, monkeypatch, retries=2)
    with pytest.raises(
        RoleError,
        match=r"step 3, reward_model.url=http://127.0.0.1:\d+/score: 3 requests failed.*503",
    ):
        mix(samples, [score], Config())
    assert server.calls == 3


@pytest.mark.parametrize("on_error", ["zero", "drop"])
def test_one_request_that_fails_for_good_costs_only_its_own_samples(monkeypatch, on_error):
    server = Server()
    cfg = Config()
    server.answers = [500, 500]
    cfg.reward.on_error = on_error
    samples = [sample(row, reward=1.0) for row in range(8)]
    samples[0].extra = {"fault": "reward/timeouts", "error": "the function's"}
    mix(samples, ask(server, samples, monkeypatch, retries=0), cfg)
    bad = [s for s in samples if "error" in s.extra]
    assert len(bad) in (8, 4, 5)
    assert all(s.reward == (1.0 if s in bad[1:] else s.reward) for s in samples)
    assert samples[0].extra["error"] == "the function's", "the first cause stays"
    assert all("500" in s.extra["error"] and s.extra["fault"] == "reward/errors" for s in bad[1:])
    assert all(math.isfinite(s.reward) for s in samples)


@pytest.mark.parametrize("on_error", ["zero", "drop"])
def test_the_error_of_a_sample_shows_no_secret(tmp_path, monkeypatch, on_error):
    """Neither on the screen nor in a file: of a step, of a checkpoint, of a batch that is kept."""
    monkeypatch.setattr(
        "one_step_off.training.reward_models.asyncio.sleep", lambda s: real_sleep(min(s, 0.01))
    )
    cfg = Config()
    samples = [sample(0)]
    out = io.StringIO()
    cfg.reward.on_error = on_error
    cfg.reward_model.retries = 0
    cfg.reward_model.url = "http://me:hunter2pass@127.0.0.1:9/v1?token=s3cr3tvalue"
    batch = Batch(3, samples, (0, 0))
    mix(samples, asyncio.run(RemoteRewardModel(cfg, PROMPTS.get).rewards(batch)), cfg)
    assert "reward_model.url=http://***@127.0.0.1:9/v1?token=***" in samples[0].extra["error"]
    write_batch(batch, tmp_path / "skipped")
    SampleDump(tmp_path, PROMPTS.get).write(LogEntry({}, 3, False, samples))
    RunConsole(out).print_line(f"warning: the first: {samples[0].extra['error']}")
    written = [p.read_text() for p in tmp_path.rglob("*.jsonl")]
    assert len(written) == 2
    assert all("token=***" in text for text in (*written, out.getvalue()))
    assert not any(
        secret in text
        for text in (*written, out.getvalue())
        for secret in ("hunter2pass", "s3cr3tvalue")
    )


def test_a_server_that_hangs_is_not_waited_for(monkeypatch):
    server = Server()
    server.answers = [12.0]
    begin = time.perf_counter()
    samples = [sample(0)]
    assert math.isnan(*ask(server, samples, monkeypatch, timeout_s=0.3, retries=0))
    assert "Timeout" in samples[0].extra["error"]
    assert time.perf_counter() - begin < 10


def test_the_same_tokenizer_reads_the_policys_own_tokens():
    tokenizer = build_tokenizer()
    (ids,) = sequences_for([sample(1)], PROMPTS.get, tokenizer, tokenizer)
    assert ids.tolist() == [7, 8, 0, 1, 2]


def test_another_tokenizer_reads_the_chat_anew():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(
        models.WordLevel(
            {w: i for i, w in enumerate(["?", "user", "assistant", "q1", "27"])}, unk_token="?"
        )
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    theirs = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    theirs.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    (ids,) = sequences_for([sample(1)], PROMPTS.get, build_tokenizer(), theirs)
    assert ids.tolist() == [1, 3, 2, 4]
    theirs.chat_template = None
    (ids,) = sequences_for([sample(1, text=" 27")], PROMPTS.get, build_tokenizer(), theirs)
    assert ids.tolist() == [3, 4]


def test_rewards_are_mixed_by_weight_and_keep_their_parts():
    cfg = Config()
    cfg.reward.weight = 2.0
    cfg.reward_model.weight = 0.5
    samples = [sample(0, reward=1.0), sample(1, reward=0.0)]
    mix(samples, [3.0, -1.0], cfg)
    assert [s.reward for s in samples] == [3.5, -0.5]
    assert samples[0].extra["reward_parts"] == {"function": 1.0, "model": 3.0}
    samples[0].extra["reward_parts"] = {"right": 1.0, "form": 0.5}
    mix(samples[:1], [2.0], cfg)
    assert samples[0].extra["reward_parts"] == {"right": 1.0, "form": 0.5, "model": 2.0}
    with pytest.raises(RoleError, match="a part named model"):
        mix(samples[:1], [2.0], cfg)
    with pytest.raises(RoleError, match=r"prompt \(0, 0\), sample 0 is nan"):
        mix(samples, [math.nan, 0.0], cfg)


@pytest.mark.parametrize("score", [1e308, -1.7e308, math.inf, math.nan])
def test_a_score_too_large_to_be_mixed_is_an_error_of_its_sample(score):
    """Left alone, weight times score, or a group's sum, would be infinite, and no policy of errors
    would catch that."""
    cfg = Config()
    samples = [sample(0, reward=1.0), sample(1, reward=0.5)]
    cfg.reward_model.weight = 1e6
    cfg.reward.on_error = "zero"
    mix(samples, [score, 1e-6], cfg)
    assert [s.reward for s in samples] == [1.0, 1.5]
    assert samples[0].extra["fault"] == "reward/errors"
    assert "of prompt (0, 0), sample 0 is " in samples[0].extra["error"]
    assert "error" not in samples[1].extra
    cfg.reward.on_error = "stop"
    with pytest.raises(RoleError, match=r"prompt \(0, 0\), sample 0 is .*1e\+30"):
        mix([sample(0)], [score], cfg)
