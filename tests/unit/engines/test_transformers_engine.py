"""The reference engine generates: right log-probs, versions, pauses, stops, failures."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import numpy as np
import pytest
import torch

from one_step_off.cluster.errors import SyncError
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.engines.engine import EngineLoad, GenerationRequest
from one_step_off.engines.transformers.engine import TransformersEngine
from tests.conftest import tiny_config
from tests.unit.engines.running_engine import (
    VERSION,
    asks,
    context,
    plain_log_probs,
    run,
    running,
    wait_for_tokens,
)

LONG = 400
"""Tokens of an answer that is not over before a test does something to it."""

NEVER_ENDS = {"rollout.sampling_kwargs": {"ignore_eos": True}}


@pytest.fixture
def config(models, tmp_path):
    """config(**changes) of a tiny model."""
    return lambda **changes: tiny_config(models(), str(tmp_path), **changes)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_one_forward_pass_whatever_is_batched_together(config, temperature):
    async def main():
        async with running(config()) as engine:
            requests = [asks(length, temperature=temperature) for length in (3, 31, 8, 17)]
            together = await asyncio.gather(*map(engine.generate, requests))
            alone = [await engine.generate(request) for request in requests]
            for request, generated, again in zip(requests, together, alone, strict=True):
                assert generated.log_probs.dtype == np.float32
                expected = plain_log_probs(
                    engine.thread.model, request.ids, generated.ids, temperature
                )
                np.testing.assert_allclose(generated.log_probs, expected, atol=1e-5)
                np.testing.assert_array_equal(again.ids, generated.ids)
                np.testing.assert_allclose(again.log_probs, generated.log_probs, atol=1e-5)
                assert generated.versions.tolist() == [VERSION[1]] * len(generated.ids)
                assert generated.attempt == VERSION[0]

    run(main)


def test_requests_without_a_seed_take_the_engines_numbers(config):
    async def tokens_of(engine_seed: int) -> list[list[int]]:
        async with running(config(**NEVER_ENDS), engine_seed) as engine:
            answers = [await engine.generate(asks(seed=None)) for _ in range(2)]
            return [answer.ids.tolist() for answer in answers]

    async def main():
        first, second = await tokens_of(1)
        assert first != second
        assert [first, second] == await tokens_of(1)
        assert [first, second] != await tokens_of(2)

    run(main)


def test_greedy_decoding_takes_the_likeliest_token(config):
    async def main():
        async with running(config(**NEVER_ENDS)) as engine:
            request = asks(temperature=0.0, seed=None, top_p=0.5)
            sampled, generated = await asyncio.gather(
                engine.generate(asks(length=20)), engine.generate(request)
            )
            ids = torch.tensor(np.concatenate([request.ids, generated.ids]), dtype=torch.int64)
            with torch.no_grad():
                logits = engine.thread.model(input_ids=ids[None]).logits[0]
            assert logits[7:-1].argmax(-1).tolist() == generated.ids.tolist()
            expected = plain_log_probs(engine.thread.model, request.ids, generated.ids)
            np.testing.assert_allclose(generated.log_probs, expected, atol=1e-5)
            assert len(sampled.ids) == 12

    run(main)


def test_a_request_goes_on_after_a_pause_with_other_weights(config):
    """Each token has the version, and the log-prob, of the weights that sampled it."""

    async def main():
        async with running(config(**NEVER_ENDS)) as engine:
            old_model = copy.deepcopy(engine.thread.model)
            request = asks(max_tokens=LONG)
            answer = asyncio.create_task(engine.generate(request))
            await wait_for_tokens(engine, 5)
            await engine.pause(wait=False, clear_cache=True)
            before_pause = len(engine.thread.requests[0].tokens)
            assert 5 <= before_pause < LONG
            engine.worker.spoil = lambda: [
                parameter.mul_(1.5) for parameter in engine.thread.model.parameters()
            ]
            await engine.call_workers("spoil")
            await asyncio.sleep(0.05)
            assert len(engine.thread.requests[0].tokens) == before_pause
            await engine.resume((VERSION[0], 6))
            generated = await answer
            versions = [VERSION[1]] * before_pause + [6] * (LONG - before_pause)
            assert generated.versions.tolist() == versions
            old = plain_log_probs(old_model, request.ids, generated.ids)[:before_pause]
            new = plain_log_probs(engine.thread.model, request.ids, generated.ids)[before_pause:]
            np.testing.assert_allclose(generated.log_probs[:before_pause], old, atol=1e-4)
            np.testing.assert_allclose(generated.log_probs[before_pause:], new, atol=1e-4)
            changed = plain_log_probs(old_model, request.ids, generated.ids)[before_pause:]
            assert abs(new - changed).max() > 0.1, "the weights differ"

    run(main)


def test_weights_of_two_attempts_make_no_answer(config):
    async def main():
        async with running(config(**NEVER_ENDS)) as engine:
            answer = asyncio.create_task(engine.generate(asks(max_tokens=LONG)))
            await wait_for_tokens(engine, 2)
            await engine.pause(wait=False, clear_cache=True)
            await engine.resume((VERSION[0] + 1, 0))
            with pytest.raises(RuntimeError, match=r"weights of attempts \[2, 3\]"):
                await answer

    run(main)


def test_a_pause_that_waits_finishes_the_requests_that_are_here(config):
    async def main():
        async with running(config(**NEVER_ENDS)) as engine:
            early = asyncio.create_task(engine.generate(asks(max_tokens=60)))
            await wait_for_tokens(engine, 2)
            pause = asyncio.create_task(engine.pause(wait=True, clear_cache=True))
            await engine.heartbeat()
            late = asyncio.create_task(engine.generate(asks(length=9)))
            await pause
            assert len((await early).ids) == 60
            await asyncio.sleep(0.05)
            assert not late.done()
            assert engine.has_unfinished_requests()
            assert engine.load == EngineLoad(running=0, waiting=1)
            await engine.resume((VERSION[0], 6))
            assert set((await late).versions.tolist()) == {6}
            assert (await late).queue_s >= 0.05 > (await early).queue_s, "it waited for the sync"
            assert (await late).prefill_s > 0

    run(main)


def test_nothing_is_generated_before_the_first_weights(config):
    async def main():
        engine = TransformersEngine(config(), "cpu")
        await engine.start()
        answer = asyncio.create_task(engine.generate(asks()))
        await asyncio.sleep(0.1)
        await engine.heartbeat()
        assert not answer.done()
        await engine.resume((0, 0))
        assert set((await answer).versions.tolist()) == {0}
        engine.shutdown()

    run(main)


def test_a_cancelled_request_is_given_up_and_its_neighbors_are_not(config):
    async def main():
        async with running(config(**NEVER_ENDS)) as engine:
            expected = await engine.generate(asks(length=9, max_tokens=40))
            cancelled = asyncio.create_task(engine.generate(asks(max_tokens=LONG)))
            neighbor = asyncio.create_task(engine.generate(asks(length=9, max_tokens=40)))
            await wait_for_tokens(engine, 2)
            cancelled.cancel()
            assert (await neighbor).ids.tolist() == expected.ids.tolist()
            for _ in range(500):
                if not engine.has_unfinished_requests():
                    break
                await asyncio.sleep(0.01)
            assert not engine.has_unfinished_requests()
            assert engine.started_requests == engine.finished_requests == 3

    run(main)


def test_a_cancelled_request_is_given_up_during_a_pause(config):
    async def main():
        async with running(config(**NEVER_ENDS)) as engine:
            request = asyncio.create_task(engine.generate(asks(max_tokens=LONG)))
            await wait_for_tokens(engine, 2)
            await engine.pause(wait=False, clear_cache=True)
            assert engine.has_unfinished_requests()
            request.cancel()
            while engine.has_unfinished_requests():
                await asyncio.sleep(0.01)

    run(main)


def test_all_requests_that_are_cancelled_at_once_are_given_up(config):
    async def main() -> None:
        async with running(config()) as engine:
            await engine.pause(wait=False, clear_cache=True)
            calls = [asyncio.create_task(engine.generate(asks(seed=i))) for i in range(512)]
            await asyncio.sleep(0.1)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            while engine.has_unfinished_requests():
                await asyncio.sleep(0.01)

    run(main)


def test_a_pause_whose_caller_was_cancelled_holds_nothing_back(config):
    async def main() -> None:
        async with running(config()) as engine:
            first = asyncio.create_task(engine.generate(asks(max_tokens=200)))
            await wait_for_tokens(engine, 1)
            pause = asyncio.create_task(engine.pause(wait=True, clear_cache=True))
            await asyncio.sleep(0.01)
            pause.cancel()
            await asyncio.gather(pause, return_exceptions=True)
            await engine.pause(wait=False, clear_cache=True)
            await engine.resume(VERSION)
            await engine.generate(asks())
            await first

    run(main)


def test_requests_join_those_under_way(config):
    async def main():
        async with running(config(**NEVER_ENDS)) as engine:
            long = asyncio.create_task(engine.generate(asks(max_tokens=LONG)))
            await wait_for_tokens(engine, 3)
            short = await engine.generate(asks(length=9, max_tokens=4))
            assert not long.done()
            assert len(short.ids) == 4
            long_answer = await long
            expected = plain_log_probs(engine.thread.model, context(8), long_answer.ids)
            np.testing.assert_allclose(long_answer.log_probs, expected, atol=1e-4)

    run(main)


def test_rows_are_as_many_as_the_cache_holds(config, monkeypatch):
    async def main():
        cfg = config(**NEVER_ENDS)
        async with running(cfg) as engine:
            expected = await asyncio.gather(*(engine.generate(asks(n)) for n in range(5, 12)))
            rows_of_call: list[int] = []
            generate = engine.thread.model.generate

            def counted(ids: Any, **settings: Any) -> Any:
                rows_of_call.append(len(ids))
                return generate(ids, **settings)

            monkeypatch.setattr(engine.thread.model, "generate", counted)
            engine.thread.max_cached_tokens = 3 * (11 + 12)
            again = await asyncio.gather(*(engine.generate(asks(n)) for n in range(5, 12)))
            assert max(rows_of_call) == 3
            for first, second in zip(expected, again, strict=True):
                assert first.ids.tolist() == second.ids.tolist()
            rows_of_call.clear()
            engine.thread.max_cached_tokens = 0  # less than one request needs
            await engine.generate(asks())
            assert rows_of_call == [1]

    run(main)


def text_of_answer(engine: TransformersEngine, generated: Any) -> str:
    return engine.tokenizer.decode(generated.ids.tolist(), skip_special_tokens=True)


def test_an_answer_ends_at_a_text_with_the_token_that_completes_it(config):
    async def main():
        async with running(config(**NEVER_ENDS)) as engine:
            whole = await engine.generate(asks(max_tokens=60))
            text = text_of_answer(engine, whole)
            stop = text[10:13]
            end = text.index(stop) + len(stop)
            generated = await engine.generate(asks(max_tokens=60, stop=("not in it", stop)))
            assert generated.finish_reason == "stop"
            assert generated.ids.tolist() == whole.ids[: len(generated.ids)].tolist()
            assert len(text_of_answer(engine, generated)) >= end
            without_last = engine.tokenizer.decode(generated.ids[:-1].tolist())
            assert stop not in without_last
        settings = {"ignore_eos": True, "stop": stop}
        async with running(config(**{"rollout.sampling_kwargs": settings})) as engine:
            by_config = await engine.generate(asks(max_tokens=60))
            assert by_config.ids.tolist() == generated.ids.tolist()

    run(main)


def test_an_answer_ends_at_a_token(config):
    async def main():
        async with running(config(**NEVER_ENDS)) as engine:
            whole = await engine.generate(asks(max_tokens=20))
            assert whole.finish_reason == "length"
        tokens = whole.ids.tolist()
        end = tokens.index(tokens[9]) + 1
        settings = {"ignore_eos": True, "stop_token_ids": [tokens[9]]}
        async with running(config(**{"rollout.sampling_kwargs": settings})) as engine:
            generated = await engine.generate(asks(max_tokens=20))
            assert generated.ids.tolist() == tokens[:end]
            assert generated.finish_reason == "stop"
        async with running(config()) as engine:
            engine.thread.submit(_make_certain, engine.thread.model, engine.tokenizer.eos_token_id)
            generated = await engine.generate(asks(max_tokens=20))
            assert generated.ids.tolist() == [engine.tokenizer.eos_token_id]
            assert generated.finish_reason == "stop"

    run(main)


def _make_certain(model: Any, token: int) -> None:
    """Let the model always choose this token."""
    forward = model.forward

    def certain(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits[..., token] += 1e3
        return output

    model.forward = certain


def test_a_forward_pass_that_fails_ends_the_engine_and_nothing_hangs(config, monkeypatch):
    async def main():
        async with running(config(**NEVER_ENDS)) as engine:
            answers = [
                asyncio.create_task(engine.generate(asks(n, max_tokens=LONG))) for n in (5, 6)
            ]
            await wait_for_tokens(engine, 2)

            def fail(*_: Any, **__: Any) -> None:
                raise ValueError("no memory")

            monkeypatch.setattr(engine.thread.model, "forward", fail)
            died = "the engine died: ValueError: no memory"
            for answer in answers:
                with pytest.raises(RuntimeError, match=died):
                    await answer
            assert engine.errored
            assert not engine.has_unfinished_requests()
            with pytest.raises(RuntimeError, match=died):
                await engine.generate(asks())
            with pytest.raises(RuntimeError, match=died):
                await engine.heartbeat()
            with pytest.raises(SyncError, match=died):
                await engine.call_workers("kv_cache_bytes")

    run(main)


@pytest.mark.parametrize(
    "request_",
    [asks(length=0), asks(max_tokens=0), GenerationRequest(np.array([1, 10**6]), 4, 1.0)],
)
def test_a_request_that_the_model_cannot_answer_fails_alone(config, request_):
    async def main():
        async with running(config(**NEVER_ENDS)) as engine:
            neighbor = asyncio.create_task(engine.generate(asks(max_tokens=40)))
            with pytest.raises(ValueError, match="at least 1, and every token below"):
                await engine.generate(request_)
            assert len((await neighbor).ids) == 40
            assert not engine.errored

    run(main)


def test_a_worker_call_that_fails_is_a_sync_error_and_the_engine_goes_on(config):
    async def main():
        async with running(config()) as engine:
            with pytest.raises(SyncError, match="no_such_method"):
                await engine.call_workers("no_such_method")
            with pytest.raises(SyncError, match="must connect first"):
                await engine.call_workers("sync_weights", 3, False)
            await engine.generate(asks())
            assert not engine.errored
            with pytest.raises(RuntimeError, match="keeps no cache"):
                await engine.pause(wait=False, clear_cache=False)

    run(main)


def test_scores_are_log_probs_at_temperature_1(config):
    async def main():
        async with running(config(**{"rollout.temperature": 0.5})) as engine:
            ids = context(30)
            expected = plain_log_probs(engine.thread.model, ids[:1], ids[1:])
            # Also while it generates.
            _, scores = await asyncio.gather(
                engine.generate(asks(max_tokens=60)), engine.score(ids)
            )
            assert scores.dtype == np.float32
            np.testing.assert_allclose(scores, expected, atol=1e-5)

    run(main)


def test_a_start_that_fails_names_the_reason(config, tmp_path):
    cfg = config()
    cfg.model.path = str(tmp_path / "no_model")
    engine = TransformersEngine(cfg, "cpu")
    with pytest.raises(RuntimeError, match="its engine did not start: .*no_model"):
        run(engine.start)
    assert not engine.processes()


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("rollout.tensor_parallel_size", 2, "2: .*set it to 1"),
        ("rollout.engine_kwargs", {"max_num_seqs": 4}, "{max_num_seqs: 4}: .*remove them"),
        ("weight_sync.in_flight", "keep", "keep: .*use recompute"),
        ("weight_sync.lora", "adapter", "adapter: .*use merged"),
        ("agent.endpoint", True, "true: .*serves no external agents"),
    ],
)
def test_what_it_does_not_offer_is_refused(key, value, shown):
    cfg = Config()
    cfg.placement.device = "cpu"
    TransformersEngine.check(cfg)
    section, name = key.split(".")
    setattr(getattr(cfg, section), name, value)
    with pytest.raises(ConfigError, match=f"^{key}={shown}.* or use rollout.engine=vllm$"):
        TransformersEngine.check(cfg)


def test_a_gpu_is_not_shared_in_turns():
    cfg = Config()
    cfg.placement.device = "cuda"
    cfg.placement.pools = {"all": [1]}
    cfg.placement.roles = {"rollout": "all", "actor": "all"}
    with pytest.raises(ConfigError, match=r"^placement\.roles=.*a pool of its own"):
        TransformersEngine.check(cfg)
    cfg.placement.device = "cpu"
    TransformersEngine.check(cfg)
