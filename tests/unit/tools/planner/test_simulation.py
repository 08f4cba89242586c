"""The pipeline in simulated time, against the arithmetic of its steps."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.data.staleness import StalenessError
from one_step_off.tools.planner.simulated_trainer import SimulatedSync
from one_step_off.tools.planner.simulation import simulate, simulated_loop, step_with_lending
from one_step_off.tools.planner.work import Work
from one_step_off.weight_sync.versions import VersionTable

STEP = "median/time/step_s"
SETTINGS = ("auto", "true", "false")  # of weight_sync.overlap
ALIKE = Work(8, np.full((3, 4), 100), 20.0, 0.02, 1e-4, 2.0, 5e-4, 1.0, canary_s=0.25)


def parts(work: Work, replicas: int, ranks: int) -> tuple[float, float]:
    """Seconds of generation and training where all responses are alike and have a place."""
    length = int(work.lengths[0, 0])
    samples = work.prompts * work.lengths.shape[1]
    generate = length * (work.decode_s + work.sequence_s * samples / replicas)
    tokens = samples * (length + work.prompt_tokens)
    train = work.train_fixed_s + work.train_token_s * tokens / ranks
    return generate, train


def test_a_simulated_clock_takes_no_time() -> None:
    async def day() -> float:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        limit = asyncio.timeout(1e9)  # that is not reached: the clock must not jump to it
        async with limit:
            await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(86_400))
        return loop.time() - begin

    begin = time.perf_counter()
    with asyncio.Runner(loop_factory=simulated_loop) as runner:
        assert runner.run(day()) == pytest.approx(86_400)
    assert time.perf_counter() - begin < 5


def test_a_program_with_many_open_files_can_be_simulated() -> None:
    """select() knows no descriptor above 1023."""
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, min(hard, 2048)), hard))
    with contextlib.ExitStack() as files, open(os.devnull) as first:
        for _ in range(1100):
            files.callback(os.close, os.dup(first.fileno()))
        with asyncio.Runner(loop_factory=simulated_loop) as runner:
            runner.run(asyncio.sleep(3600))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def test_what_never_happens_is_an_error_and_no_hang() -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    runner = asyncio.Runner(loop_factory=simulated_loop)
    with pytest.raises(RuntimeError, match="waits for an event that no task will cause"):
        runner.run(forever())


@pytest.mark.parametrize("overlap", ["true", "false"])
@pytest.mark.parametrize("train_token_s", [1e-6, 5e-4, 4e-3])
def test_one_step_off_takes_the_longer_phase_and_what_is_exposed(
    overlap: str, train_token_s: float
) -> None:
    work = replace(ALIKE, train_token_s=train_token_s)
    generate, train = parts(work, 2, 3)
    found = simulate(work, 2, 3, overlap=overlap)
    canary = work.canary_s
    sending = work.sync_s - canary
    if overlap == "true":
        # The trainer scores the canary before its step; the replicas wait for that only if they are
        # there first.
        expected = max(train + canary, sending + generate)
    else:
        expected = sending + max(generate, train) + max(0.0, canary - max(0.0, generate - train))
    assert found[STEP] == pytest.approx(expected)
    assert found["median/time/generate_s"] == pytest.approx(generate)
    assert found["median/time/train_s"] == pytest.approx(train, abs=canary + 1e-9)


def test_paused_requests_continue_while_the_canary_is_scored() -> None:
    """They pause for the transfer alone, and what is complete is held back until the acceptance."""
    work = replace(
        ALIKE, decode_s=0.0, sequence_s=1e-3, train_fixed_s=0.1, train_token_s=0.0, sync_s=2.0
    )
    work = replace(work, replica_canary_s=0.8)
    generate, _ = parts(work, 1, 1)
    found = simulate(work, 1, 1, 2, "false", steps=41, in_flight="keep")
    step = 32 / found["samples_per_s"]
    assert step == pytest.approx(generate + work.transfer_s, rel=0.06)


@pytest.mark.parametrize(
    ("train_token_s", "chosen"), [(1e-6, "false"), (5e-4, "true"), (4e-3, "true")]
)
def test_auto_has_the_figures_of_the_setting_that_it_chooses(
    train_token_s: float, chosen: str
) -> None:
    work = replace(ALIKE, train_token_s=train_token_s)
    step_s = {setting: simulate(work, 2, 3, overlap=setting)[STEP] for setting in SETTINGS}
    assert step_s["auto"] == step_s[chosen]
    assert step_s["true"] < step_s["false"]


def test_a_synchronous_step_is_the_sum_of_its_phases() -> None:
    generate, train = parts(ALIKE, 4, 2)
    found = simulate(ALIKE, 4, 2, staleness=0)
    assert found[STEP] == pytest.approx(generate + train + ALIKE.sync_s)
    assert found["idle_share/trainer"] == pytest.approx(1 - train / found[STEP])
    assert found["idle_share/rollout"] == pytest.approx(1 - generate / found[STEP])
    assert found["samples_per_s"] == pytest.approx(32 / found[STEP])


def test_colocated_all_devices_do_both() -> None:
    assert simulate(ALIKE, 0, 8, staleness=0)[STEP] == pytest.approx(
        sum(parts(ALIKE, 8, 8)) + ALIKE.sync_s
    )


@pytest.mark.parametrize("train_token_s", [1e-6, 5e-4, 4e-3])
def test_on_a_shared_device_the_step_is_the_sum_of_the_work(train_token_s: float) -> None:
    """Both at half speed while both work, so the device is busy all the time; only the sync, in
    which nothing is generated, may leave it idle."""
    work = replace(ALIKE, train_token_s=train_token_s)
    generate, train = parts(work, 1, 1)
    found = simulate(work, 1, 1, shared=True)
    busy = generate + train + work.canary_s
    idle = max(0.0, work.sync_s - work.canary_s - train)
    assert found[STEP] == pytest.approx(busy + idle)


def test_on_a_shared_device_the_shorter_phase_takes_twice_as_long() -> None:
    work = replace(ALIKE, sync_s=0.0, canary_s=0.0)
    generate, train = parts(work, 1, 1)
    assert train > generate
    found = simulate(work, 1, 1, shared=True)
    assert found["median/time/generate_s"] == pytest.approx(2 * generate)
    assert found["median/time/train_s"] == pytest.approx(train + generate)


def test_the_optimizer_waits_for_weights_that_are_still_sent() -> None:
    """A sync longer than all training: the step is sync and generation, and its wait is no
    training."""
    work = replace(
        ALIKE, sync_s=100.0, canary_s=0.0, train_fixed_s=1.0, train_token_s=0.0, before_step=0.5
    )
    found = simulate(work, 1, 1)
    assert found[STEP] == pytest.approx(100 + parts(work, 1, 1)[0])
    assert found["median/time/train_s"] == pytest.approx(1.0)


@pytest.mark.parametrize("static", [True, False])
def test_a_sequence_without_a_place_waits(static: bool) -> None:
    """32 sequences, 5 places: six waves of five and one of two."""
    work = replace(ALIKE, places=5)
    generate = 100 * (6 * (0.02 + 5e-4) + 0.02 + 2e-4)
    found = simulate(work, 1, 1, staleness=0, static=static)
    assert found["median/time/generate_s"] == pytest.approx(generate)


def test_the_longest_response_is_as_long_on_many_replicas() -> None:
    """And the others go on alone, faster than all together."""
    work = replace(ALIKE, prompts=1, lengths=np.array([[10, 40]]))
    found = simulate(work, 8, 1, staleness=0)
    assert found["median/time/generate_s"] == pytest.approx(10 * (0.02 + 2e-4) + 30 * (0.02 + 1e-4))


def test_by_load_no_replica_waits_with_prompts_of_another() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, (64, 1))
    work = replace(ALIKE, prompts=64, lengths=lengths, places=4)
    by_load = simulate(work, 4, 1, staleness=0, static=False)["median/time/generate_s"]
    static = simulate(work, 4, 1, staleness=0, static=True)["median/time/generate_s"]
    assert by_load < 0.95 * static


def test_the_same_arguments_give_the_same_figures() -> None:
    work = replace(ALIKE, lengths=np.random.default_rng(0).integers(1, 500, (50, 4)))

    def figures(seed: int) -> list[float]:
        found = simulate(work, 3, 2, seed=seed)
        names = (
            STEP,
            "idle_share/rollout",
            "idle_share/trainer",
            "samples_per_s",
            "median/time/wait_rollout_s",
        )
        return [found[name] for name in names]

    assert figures(1) == figures(1) != figures(2)


def test_the_real_assertion_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that were told to be older than they are: the pipeline refuses the batch."""
    real = SimulatedSync.__call__

    async def late(self, stamp, expected=None):
        table = self.versions
        self.versions = VersionTable()  # which would refuse it at once
        metrics = await real(self, (stamp[0], max(0, stamp[1] - 1)), expected)
        self.versions = table
        table.send(stamp, [])
        return metrics

    monkeypatch.setattr(SimulatedSync, "__call__", late)
    with pytest.raises(StalenessError, match="step 2"):
        simulate(ALIKE, 1, 1)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.floats(0, 0.1),
    st.floats(1e-6, 1e-3),
    st.floats(0, 50),
    st.floats(1e-6, 1e-2),
    st.floats(0, 20),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from(SETTINGS),
    st.booleans(),
    st.integers(1, 40),
    st.integers(1, 300),
)
def test_a_step_is_never_shorter_than_a_phase_nor_longer_than_their_sum(
    replicas,
    ranks,
    decode,
    each,
    fixed,
    token,
    sync,
    canary,
    before,
    overlap,
    static,
    places,
    length,
) -> None:
    work = Work(
        6,
        np.full((1, 2), length),
        10.0,
        decode,
        each,
        fixed,
        token,
        sync,
        canary * sync,
        before,
        places,
    )
    synchronous = simulate(work, replicas, ranks, 0, overlap, static, steps=5)
    one_step_off = simulate(work, replicas, ranks, 1, overlap, static, steps=5)
    generate = synchronous["median/time/generate_s"]
    train = synchronous["median/time/train_s"]
    assert synchronous[STEP] == pytest.approx(generate + train + sync)
    assert max(generate, train) * (1 - 1e-9) <= one_step_off[STEP]
    assert one_step_off[STEP] <= synchronous[STEP] * (1 + 1e-9)
    for figures in (synchronous, one_step_off):
        for role in ("rollout", "trainer"):
            assert 0 <= figures[f"idle_share/{role}"] <= 1


LONG_TAIL = Work(
    8,
    np.random.default_rng(0).lognormal(np.log(100), 1.0, (16, 4)).clip(1, 800).astype(int),
    20.0,
    0.02,
    1e-4,
    1.0,
    2e-4,
    sync_s=0.2,
    canary_s=0.05,
)
"""Generation is the longer phase, and a few responses take most of it."""


def test_older_samples_make_stragglers_cheaper() -> None:
    rates = {}
    for staleness, in_flight in ((1, "wait"), (2, "wait"), (4, "wait"), (2, "keep")):
        found = simulate(LONG_TAIL, 1, 1, staleness, steps=25, in_flight=in_flight)
        rates[staleness, in_flight] = found["samples_per_s"]
    assert rates[1, "wait"] < rates[2, "wait"] < rates[4, "wait"]
    assert rates[2, "keep"] > 1.3 * rates[1, "wait"]


def test_where_training_is_longer_staleness_gains_the_syncs_alone() -> None:
    """Overlapped syncs cost nothing at any age, and each step takes as long as training."""
    work = replace(ALIKE, train_fixed_s=9.0)
    _, train = parts(work, 2, 2)
    for staleness, in_flight in ((1, "wait"), (3, "wait"), (3, "recompute")):
        found = simulate(work, 2, 2, staleness, "true", steps=16, in_flight=in_flight)
        assert found[STEP] == pytest.approx(train + work.canary_s, rel=0.05)


@pytest.mark.parametrize(("in_flight", "syncs"), [("wait", 0.5), ("recompute", 1.0)])
def test_a_pause_takes_as_long_as_the_sync(in_flight: str, syncs: float) -> None:
    """Generation is far longer, and takes as long for many sequences at once as one after another.
    A step takes it and its share of a sync; requests go on while the trainer scores the canary."""
    work = replace(ALIKE, decode_s=0.0, sequence_s=1e-3, train_fixed_s=0.1, train_token_s=0.0)
    work = replace(work, sync_s=2.0)
    generate, _ = parts(work, 1, 1)
    found = simulate(work, 1, 1, 2, "false", steps=41, in_flight=in_flight)
    pause_s = work.sync_s if in_flight == "wait" else work.sync_s - work.canary_s
    step = work.prompts * 4 / found["samples_per_s"]
    assert step == pytest.approx(generate + syncs * pause_s, rel=0.06)


@pytest.mark.parametrize("ranks", [4, 6])
def test_lending_idle_trainer_gpus_takes_over_a_part_of_the_generation(ranks) -> None:
    work = replace(ALIKE, sequence_s=5e-3)
    generate, train = parts(work, 2, ranks)
    assert train < generate, "the trainer waits"
    figures = simulate(work, 2, ranks, overlap="true")
    step_s = figures[STEP]
    lent_s = step_with_lending(work, figures, 2, ranks)
    busy_s = step_s * (1 - figures["idle_share/trainer"])
    shared_s = (2 * generate + ranks * (busy_s + work.sync_s)) / (2 + ranks)
    assert busy_s < lent_s < step_s
    assert lent_s == pytest.approx(shared_s + step_s - generate, rel=0.02)


def test_lending_brings_nothing_where_the_trainer_never_waits_or_one_response_is_the_step() -> None:
    slow_trainer = replace(ALIKE, train_token_s=0.1)
    figures = simulate(slow_trainer, 2, 2)
    assert step_with_lending(slow_trainer, figures, 2, 2) == pytest.approx(figures[STEP])
    one_long = replace(ALIKE, decode_s=1.0, sequence_s=0.0)
    figures = simulate(one_long, 2, 6)
    assert step_with_lending(one_long, figures, 2, 6) == pytest.approx(figures[STEP], rel=0.02)
