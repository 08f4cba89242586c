"""The tree of turns of an episode, and the samples that it gives."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.base import Limits
from agent_loop.episode import Episode, EpisodeOver, Turn
from agent_loop.trajectory import Generated
from one_step_off.data.samples import NOT_GENERATED, Prompt

PROMPT = Prompt((2, 5), np.array([1], np.int32), "q", "a")
LIMITS = Limits(tokens=1000, turns=100)


class CountingPolicy:
    """Every token that it ever makes is another one, and its version is the turn's number. The
    "experts" of a token that it reads are the token and the turn's number."""

    def __init__(self, tokens: int = 3) -> None:
        self.tokens = tokens
        self.next_token = 10_000
        self.turns = 0
        self.attempt = 0

    async def generate(
        self, ids: np.ndarray, max_tokens: int, stop: tuple[str, ...] = ()
    ) -> Generated:
        count = min(self.tokens, max_tokens)
        new = np.arange(self.next_token, self.next_token + count, dtype=np.int32)
        self.next_token += count
        self.turns += 1
        await asyncio.sleep(0)
        log_probs = -new.astype(np.float32)
        versions = np.full(count, self.turns, np.int32)
        finish_reason = "length" if count == max_tokens else "stop"
        read = np.concatenate([ids, new[:-1]])
        experts = np.stack([read, np.full(len(read), self.turns)], -1)[:, None]
        made = Generated(new, log_probs, versions, self.attempt, finish_reason)
        return replace(made, experts=experts)


def make_episode(limits: Limits = LIMITS, max_sequence: int = 10_000) -> Episode:
    return Episode("ose-0-abcdef", PROMPT, CountingPolicy().generate, limits, max_sequence)


def say(episode: Episode, context: list[int], delivered: bool = True, most: int = 100) -> Turn:
    turn = asyncio.run(episode.turn(np.array(context, np.int32), most))
    turn.delivered = delivered
    return turn


def test_a_context_that_begins_with_a_turn_continues_its_segment() -> None:
    episode = make_episode()
    first = say(episode, [1, 2])
    second = say(episode, [*first.ids, 7, 8])
    (sample,) = episode.samples(PROMPT, 3)
    assert sample.prompt_id == (2, 5)
    assert sample.index == 3
    assert sample.prompt_ids.tolist() == [1, 2]
    assert sample.response_ids.tolist() == [*first.generated.ids, 7, 8, *second.generated.ids]
    assert sample.loss_mask.tolist() == [True] * 3 + [False] * 2 + [True] * 3
    assert sample.versions.tolist() == [1] * 3 + [NOT_GENERATED] * 2 + [2] * 3
    assert sample.log_probs[3:5].tolist() == [0.0, 0.0]
    assert "segment" not in sample.extra
    assert sample.extra["agent"]["turns"] == 2


def test_a_branch_is_a_segment_that_trains_only_its_own_turns() -> None:
    episode = make_episode()
    first = say(episode, [1, 2])
    second = say(episode, [*first.ids, 7])
    branch = say(episode, [*first.ids, 8])
    samples = episode.samples(PROMPT, 0)
    assert [s.extra["segment"] for s in samples] == [
        {"index": 0, "count": 2, "parent": -1},
        {"index": 1, "count": 2, "parent": 0},
    ]
    assert samples[0].response_ids[-3:].tolist() == second.generated.ids.tolist()
    assert samples[1].prompt_ids.tolist() == [*first.ids, 8]
    assert samples[1].response_ids.tolist() == branch.generated.ids.tolist()
    assert samples[1].loss_mask.all()


def test_the_same_context_again_is_another_segment() -> None:
    episode = make_episode()
    say(episode, [1, 2])
    say(episode, [1, 2])
    assert len(episode.samples(PROMPT, 0)) == 2


def test_requests_at_once_do_not_continue_one_segment_twice() -> None:
    episode = make_episode()
    first = say(episode, [1, 2])

    async def both() -> list[Turn]:
        contexts = [np.array([*first.ids, token], np.int32) for token in (7, 8)]
        return await asyncio.gather(*(episode.turn(context, 5) for context in contexts))

    turns = asyncio.run(both())
    assert [turn.continues for turn in turns] == [True, False]


def test_a_turn_that_nobody_received_is_not_trained_on() -> None:
    episode = make_episode()
    say(episode, [1, 2], delivered=False)
    with pytest.raises(RuntimeError, match="without a turn"):
        episode.samples(PROMPT, 0)
    repeated = say(episode, [1, 2])
    (sample,) = episode.samples(PROMPT, 0)
    assert sample.response_ids.tolist() == repeated.generated.ids.tolist()
    assert episode.turns == 1


def test_a_turn_that_the_agent_builds_on_was_received() -> None:
    episode = make_episode()
    first = say(episode, [1, 2], delivered=False)
    say(episode, [*first.ids, 7])
    (sample,) = episode.samples(PROMPT, 0)
    assert int(sample.loss_mask.sum()) == 6


def test_a_failed_turn_leaves_its_place_to_the_next() -> None:
    episode = make_episode()
    first = say(episode, [1, 2])
    working = episode.generate

    async def fail(*_: object) -> Generated:
        raise RuntimeError("the engine died")

    episode.generate = fail
    with pytest.raises(RuntimeError, match="died"):
        say(episode, [*first.ids, 7])
    episode.generate = working
    assert say(episode, [*first.ids, 7]).continues


def test_the_tokens_of_a_segment_are_limited() -> None:
    episode = make_episode(Limits(tokens=8, turns=9))
    first = say(episode, [1, 2])
    second = say(episode, [*first.ids, 7, 7])
    assert len(second.generated.ids) == 3
    third = say(episode, [*second.ids, 7])
    assert third.no_room
    assert third.generated.finish_reason == episode.limit_reached == "length"
    assert third not in episode.turns_done
    assert episode.over == ""
    assert say(episode, [1, 7]).continues is False, "a shorter context begins anew"


def test_a_sequence_is_no_longer_than_the_engine_takes() -> None:
    episode = make_episode(max_sequence=6)
    turn = say(episode, [1, 2, 3, 4])
    assert len(turn.generated.ids) == 2
    assert episode.samples(PROMPT, 0)[0].finish_reason == "length"
    assert say(episode, [1, 2, 3, 4, 5, 6]).no_room
    assert "= 6, and" in episode.no_room


def test_an_answer_cut_at_the_agents_own_limit_is_not_overlong() -> None:
    episode = make_episode()
    assert say(episode, [1, 2], most=2).cut_by_agent
    assert episode.samples(PROMPT, 0)[0].finish_reason == "turn_length"


@pytest.mark.parametrize("most", [2, 100])
def test_an_answer_cut_at_the_runs_limit_of_a_turn_is_not_cut_by_its_agent(most: int) -> None:
    episode = make_episode(Limits(tokens=1000, turns=100, turn_tokens=2))
    assert not say(episode, [1, 2], most=most).cut_by_agent
    assert episode.samples(PROMPT, 0)[0].finish_reason == "turn_length"


def test_a_whole_answer_is_cut_by_nobody() -> None:
    turn = say(make_episode(), [1, 2], most=5)
    assert not (turn.cut_by_agent or turn.cut_within_segment)


@pytest.mark.parametrize(
    ("limits", "reason", "key"),
    [
        (Limits(tokens=100, turns=1), "turns", "agent.max_turns=1"),
        (Limits(tokens=100, turns=9, seconds=0.0), "time", "agent.timeout_s=0"),
    ],
)
def test_a_limit_ends_the_episode_and_is_named(limits: Limits, reason: str, key: str) -> None:
    episode = make_episode(limits)
    with pytest.raises(EpisodeOver, match=key) as refusal:
        for _ in range(2):
            say(episode, [1, 2])
    assert refusal.value.reason == episode.over == episode.limit_reached == reason
    with pytest.raises(EpisodeOver, match=key):
        say(episode, [1, 2])


def test_an_episode_that_ended_takes_no_turn_not_even_one_in_progress() -> None:
    episode = make_episode()

    async def main() -> None:
        turn = asyncio.create_task(episode.turn(np.array([1, 2], np.int32), 5))
        await asyncio.sleep(0)
        episode.end("ended", "its replica was restarted")
        with pytest.raises(EpisodeOver, match="replica was restarted"):
            await turn

    asyncio.run(main())
    assert episode.turns_done == []


def test_weights_of_another_attempt_end_it_by_name() -> None:
    policy = CountingPolicy()
    episode = Episode("ose-0-abcdef", PROMPT, policy.generate, LIMITS, 10_000)
    say(episode, [1, 2])
    policy.attempt = 1
    with pytest.raises(RuntimeError, match="attempt 1, not 0"):
        say(episode, [1, 2])


def random_context(rng: random.Random, episode: Episode) -> list[int]:
    """Something new, or what an earlier turn holds: whole, cut off, or edited in the middle."""
    if not episode.turns_done or rng.random() < 0.2:
        return [rng.randrange(5)]
    context = rng.choice(episode.turns_done).ids.tolist()
    if rng.random() < 0.2:
        context = context[: rng.randrange(1, len(context))]
    if rng.random() < 0.2:
        context[rng.randrange(len(context))] = 99
    return context + [rng.randrange(9) for _ in range(rng.randrange(3))]


@given(seed=st.integers(0, 10**9), steps=st.integers(1, 25))
def test_each_token_is_trained_once_under_the_context_in_which_it_was_sampled(
    seed: int, steps: int
) -> None:
    """Tokens are unique, so a token's context can be read off any sample that holds it."""
    rng = random.Random(seed)
    episode = make_episode(Limits(tokens=40, turns=100))
    for _ in range(steps):
        with contextlib.suppress(EpisodeOver):
            say(episode, random_context(rng, episode), rng.random() < 0.9)
    received = [turn for turn in episode.turns_done if turn.delivered]
    if not received:
        return
    context_of = {}
    for turn in received:
        for i, token in enumerate(turn.generated.ids.tolist()):
            context_of[token] = [*turn.context_ids.tolist(), *turn.generated.ids[:i].tolist()]
    trained = []
    for sample in episode.samples(PROMPT, 0):
        tokens = [*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]
        for i in np.flatnonzero(sample.loss_mask):
            position = len(sample.prompt_ids) + i
            token = tokens[position]
            trained.append(token)
            assert tokens[:position] == context_of[token]
            assert sample.log_probs[i] == np.float32(-token)
            assert sample.experts[position - 1, 0].tolist() == [
                tokens[position - 1],
                sample.versions[i],
            ], "those of the request that made the token"
        assert sample.experts[:, 0, 0].tolist() == tokens[:-1]
    assert sorted(trained) == sorted(context_of)


def test_its_name_is_that_of_a_file() -> None:
    held_out = Prompt((-2, 5), np.array([1], np.int32), "q", "a")
    episode = Episode("ose-0-abcdef", held_out, CountingPolicy().generate, LIMITS, 100)
    assert episode.name == "val2_5_abcdef"
    assert make_episode().name == "2_5_abcdef"


def test_a_request_beyond_the_limit_costs_no_turn_that_had_begun() -> None:
    episode = make_episode(Limits(tokens=100, turns=2))

    async def main() -> list[object]:
        contexts = [np.array([token], np.int32) for token in (1, 2, 3)]
        turns = (episode.turn(context, 5) for context in contexts)
        return await asyncio.gather(*turns, return_exceptions=True)

    *turns, refused = asyncio.run(main())
    assert all(isinstance(turn, Turn) for turn in turns)
    assert isinstance(refused, EpisodeOver)
    assert len(episode.turns_done) == 2


def test_a_shorter_context_makes_good_for_one_that_was_too_long() -> None:
    episode = make_episode(max_sequence=6)
    assert say(episode, [1, 2, 3, 4, 5, 6]).no_room
    assert episode.limit_reached == "length"
    say(episode, [1, 2])
    assert episode.limit_reached == ""
