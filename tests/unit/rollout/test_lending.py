"""Lent replicas: when they wake, what they generate, and how the trainer gets its devices back.

With stand-ins for Ray actors; real ones are in the e2e tests.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from one_step_off.cluster.errors import SyncError, TrainerDied
from one_step_off.config.schema import Config
from one_step_off.rollout import lending, replica_supervisor
from one_step_off.rollout.health import ReplicaState
from one_step_off.rollout.lending import Lending, LendingChoice
from one_step_off.rollout.replica_group import RolloutGroup
from tests.unit.stand_ins import ActorMethod, RecordedEvents, make_prompts, one_token_sample


@pytest.fixture(autouse=True)
def short_polls(monkeypatch):
    """The first look is before the replicas have said how many prompts they have room for."""
    monkeypatch.setattr(lending, "POLL_S", 0.002)


PROMPTS = make_prompts(*range(12))
ALL_ROWS = [(row, i) for row in range(12) for i in range(2)]


class SleepingReplica:
    """A replica that fails as it is told.

    Attributes:
        capacity: trajectories that its KV cache has room for.
        fails_in: the method that raises, or hangs.
        asleep: whether the trainer has its device.
    """

    def __init__(
        self, seconds: float = 0.02, fails_in: str = "", hangs: bool = False, capacity: int = 64
    ) -> None:
        self.seconds = seconds
        self.capacity = capacity
        self.most_generating = 0
        self.fails_in = fails_in
        self.hangs = hangs
        self.asleep = False
        self.rows: list[int] = []
        self.idle = 0
        self.work: set[asyncio.Task] = set()
        self.start = ActorMethod((8, []))
        self.alive = ActorMethod(self.answer)
        self.ping = ActorMethod(self.answer_ping)
        self.stop = ActorMethod(None)
        self.rollout = ActorMethod(self.generate)
        self.wait_for_capacity = ActorMethod(self.poll_capacity)
        self.hand_device_back = ActorMethod(self.sleep)

    async def fail(self, place: str) -> None:
        if self.fails_in != place:
            return
        if self.hangs:
            await asyncio.sleep(60)
        raise RuntimeError(f"broken on purpose in {place}")

    async def answer(self) -> None:
        if self.fails_in == "rollout":
            raise RuntimeError("gone")

    async def answer_ping(self) -> tuple[int, int]:
        await self.fail("rollout")
        return 0, 0

    async def generate(self, prompts: list[Any], sampling: Any) -> list[Any]:
        assert not self.asleep, "the trainer has the device"
        task = asyncio.current_task()
        self.work.add(task)
        self.most_generating = max(self.most_generating, len(self.work) * sampling.n)
        try:
            await self.fail("rollout")
            await asyncio.sleep(self.seconds * len(prompts))
        finally:
            self.work.discard(task)
        self.rows += [prompt.id[1] for prompt in prompts]
        self.idle += len(prompts) * sampling.n
        return [one_token_sample(p, i) for p in prompts for i in range(sampling.n)]

    async def poll_capacity(self, sent: int, most: int) -> tuple[int, int]:
        most = min(most, self.capacity)
        while sent - self.idle >= most:
            await asyncio.sleep(0.001)
        return self.idle, most

    async def sleep(self) -> None:
        await self.fail("sleep")
        for task in self.work:
            task.cancel()
        self.idle = 0
        self.asleep = True


class LendingRun:
    """A group with one replica of its own and two lent ones, as the trainer's loop uses it."""

    def __init__(
        self, lent: list[SleepingReplica], own_s: float = 0.02, wake_s: float = 0.01
    ) -> None:
        cfg = Config()
        cfg.placement.lend = True
        cfg.rollout.n = 2
        cfg.rollout.heartbeat_s = 0.02
        cfg.rollout.heartbeat_timeout_s = 0.3
        self.own = SleepingReplica(own_s)
        self.lent = lent
        self.events = RecordedEvents()
        self.wake_s = wake_s
        self.wakes: list[list[int]] = []
        self.sync_lock = asyncio.Lock()
        numbers = range(1, 1 + len(lent))
        self.group = RolloutGroup(
            [self.own, *lent],
            cfg,
            seeded=True,
            respawn=lambda i: SleepingReplica(),
            events=self.events,
            lent=numbers,
        )
        self.supervisor = self.group.supervisor
        self.supervisor.restore = self.restore
        self.supervisor.health[0].transition_to(ReplicaState.HEALTHY)
        self.group.router.replica_capacity = 2
        self.lending = Lending(cfg, self.group)

    async def restore(self, *numbers: int, begun: asyncio.Event | None = None) -> bool:
        async with self.sync_lock:
            if begun is not None:
                begun.set()
            self.wakes.append(list(numbers))
            return await self.sync(numbers)

    async def sync(self, numbers: tuple[int, ...]) -> bool:
        await asyncio.sleep(self.wake_s)
        for i in numbers:
            replica: Any = self.group.replicas[i]
            if replica.fails_in == "sync":
                self.supervisor.mark_failed(i, "it died in the sync")
        if any(i not in self.supervisor.members for i in numbers):
            return False
        for i in numbers:
            self.group.replicas[i].asleep = False
            self.supervisor.mark_synced(i, self.group.replicas[i])
        return True

    async def step(self, step: int = 0, prompts: list[Any] = PROMPTS) -> list[tuple[int, int]]:
        """One wait of the trainer for a batch."""
        async with self.lending.while_waiting(step):
            samples, _ = await self.group.generate(
                prompts, f"step {step}", self.group.train_sampling
            )
        for i in self.supervisor.lent:
            replica: Any = self.group.replicas[i]
            state = self.supervisor.health[i].state
            assert state in (ReplicaState.ASLEEP, ReplicaState.LEFT)
            assert replica.asleep or state is ReplicaState.LEFT
        assert self.group.active == [0]
        return [(sample.prompt_id[1], sample.index) for sample in samples]


def run(main: Any) -> None:
    asyncio.run(main())


def test_lent_replicas_take_the_prompts_that_wait_and_sleep_before_the_trainer_goes_on():
    async def main():
        lent = [SleepingReplica(), SleepingReplica()]
        lendings = LendingRun(lent, own_s=0.2)
        await lendings.group.setup()
        assert [replica.asleep for replica in lent] == [True, True]
        assert not lendings.own.asleep
        assert await lendings.step() == ALL_ROWS
        assert lent[0].rows
        assert lent[1].rows
        assert lendings.wakes == [[1, 2]], "both in one sync"
        metrics = lendings.lending.metrics
        assert metrics["lend/samples"] == 2 * (len(lent[0].rows) + len(lent[1].rows))
        assert metrics["lend/seconds"] > 0
        assert metrics["lend/wake_s"] > 0
        assert metrics["lend/return_s"] > 0
        spans = [(lane, activity) for lane, activity, *_ in lendings.events.traced]
        assert ("lent", "wake") in spans
        assert ("lent", "return") in spans

    run(main)


def test_without_the_key_nothing_is_lent():
    async def main():
        lendings = LendingRun([SleepingReplica()])
        await lendings.group.setup()
        lendings.lending.lends = False
        assert await lendings.step() == ALL_ROWS
        assert lendings.wakes == []
        assert lendings.lending.metrics == {}

    run(main)


def test_nothing_is_lent_where_no_prompt_waits_and_the_user_learns_why(monkeypatch):
    monkeypatch.setattr(lending, "LONG_WAIT_S", 0.0)

    async def main():
        lendings = LendingRun([SleepingReplica()])
        await lendings.group.setup()
        lendings.group.router.replica_capacity = 64
        assert await lendings.step() == ALL_ROWS
        assert await lendings.step() == ALL_ROWS
        assert lendings.wakes == []
        hints = [line for line in lendings.events.lines if "agent.max_concurrency" in line]
        assert len(hints) == 1
        assert lendings.lending.metrics["lend/seconds"] == 0

    run(main)


def test_a_wake_up_that_waits_for_another_sync_is_left_when_the_batch_is_complete():
    async def main():
        lendings = LendingRun([SleepingReplica()], own_s=0.001)
        await lendings.group.setup()
        async with lendings.sync_lock:  # that of a restarted replica
            assert await asyncio.wait_for(lendings.step(), 10) == ALL_ROWS
        await asyncio.sleep(0.05)
        assert lendings.wakes == []
        assert not lendings.sync_lock.locked()
        assert await lendings.step(1) == ALL_ROWS
        assert lendings.wakes == [[1]]

    run(main)


def test_after_a_sync_that_failed_there_is_no_other_one_when_the_batch_is_complete():
    async def main():
        lendings = LendingRun([SleepingReplica(), SleepingReplica()], own_s=0.001, wake_s=0.3)
        await lendings.group.setup()
        lendings.lent[0].fails_in = "sync"
        assert await lendings.step() == ALL_ROWS
        assert lendings.wakes == [[1, 2]]
        assert lendings.supervisor.lendable == [2]

    run(main)


def test_an_attempt_that_ends_while_the_trainer_waits_for_the_wake_up_ends_that_too():
    async def main():
        lendings = LendingRun([SleepingReplica()], own_s=0.001, wake_s=60.0)
        await lendings.group.setup()
        waiting = asyncio.create_task(lendings.step())
        while lendings.own.rows != [prompt.id[1] for prompt in PROMPTS]:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # the block has ended, the sync goes on
        assert lendings.sync_lock.locked()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert not lendings.sync_lock.locked()

    run(main)


def test_a_wake_up_that_is_under_way_ends_before_the_trainer_goes_on():
    async def main():
        lendings = LendingRun([SleepingReplica()], own_s=0.02, wake_s=1.0)
        await lendings.group.setup()
        assert await lendings.step() == ALL_ROWS
        assert lendings.wakes == [[1]]
        assert lendings.lent[0].rows == []
        assert lendings.lending.metrics["lend/samples"] == 0

    run(main)


def test_a_lent_replica_gets_no_more_than_it_has_room_for_in_any_loan():
    """What waits in it would be generated again when it hands its device back."""

    async def main():
        lent = SleepingReplica(0.2, capacity=4)
        lendings = LendingRun([lent], own_s=0.05)
        lendings.own.capacity = 2
        await lendings.group.setup()
        lendings.group.router.replica_capacity = 64
        for step in range(2):
            lent.most_generating = 0
            sampling = lendings.group.train_sampling
            async with lendings.lending.while_waiting(step):
                await lendings.group.generate(
                    PROMPTS, f"step {step}", sampling, lambda samples: None
                )
            assert lent.most_generating == 4
        assert lendings.wakes == [[1], [1]]

    run(main)


def test_the_trainer_ends_its_own_work_before_its_device_is_lent():
    async def main():
        lendings = LendingRun([SleepingReplica()], own_s=0.05)
        await lendings.group.setup()
        canary = asyncio.get_running_loop().create_future()
        begun = lendings.lending.while_waiting(0, canary)
        work = lendings.group.generate(PROMPTS, "step 0", lendings.group.train_sampling)
        async with begun:
            await asyncio.sleep(0.05)
            generating = asyncio.create_task(work)
            await asyncio.sleep(0.05)
            assert lendings.wakes == []
            canary.set_result(None)
            await generating
            assert lendings.wakes == [[1]]

    run(main)


@pytest.mark.parametrize(
    ("place", "hangs"),
    [("rollout", False), ("rollout", True), ("sync", False), ("sleep", False), ("sleep", True)],
)
def test_a_lent_replica_that_fails_is_given_up_and_the_run_goes_on(place, hangs, monkeypatch):
    monkeypatch.setattr(lending, "RETURN_S", 0.1)
    monkeypatch.setattr(replica_supervisor, "PING_S", 0.05)

    async def main():
        broken = SleepingReplica()
        fine = SleepingReplica()
        lendings = LendingRun([broken, fine], own_s=0.05)
        await lendings.group.setup()
        broken.fails_in, broken.hangs = place, hangs
        ended = []
        lendings.supervisor.end_lent = ActorMethod(ended.append).remote
        watch = asyncio.create_task(lendings.group.watch())
        assert await lendings.step() == ALL_ROWS
        assert ended == [1]
        assert lendings.group.restarts == 0
        assert lendings.supervisor.lendable == [2]
        assert sum("rollout 1" in line for line in lendings.events.lines) == 1
        fine.rows.clear()
        assert await lendings.step(1) == ALL_ROWS
        assert fine.rows, "the other one is lent as before"
        assert ended == [1]
        watch.cancel()

    run(main)


def test_a_lent_replica_may_be_given_up_just_before_it_is_put_to_sleep():
    async def main():
        lendings = LendingRun([SleepingReplica()])
        await lendings.group.setup()
        supervisor = lendings.supervisor
        supervisor.wake(1)
        going_to_sleep = asyncio.create_task(supervisor.put_to_sleep(1, 1.0))
        supervisor.drop_lent(1, "no heartbeat")
        await going_to_sleep
        assert supervisor.health[1].state is ReplicaState.LEFT
        assert len(supervisor.endings) == 1

    run(main)


def test_a_sync_that_fails_gives_up_the_lent_replicas_alone():
    async def main():
        lendings = LendingRun([SleepingReplica(), SleepingReplica()], own_s=0.05)
        await lendings.group.setup()

        async def restore(*numbers: int, begun: asyncio.Event | None = None) -> bool:
            raise SyncError("checksum of bucket 3")

        lendings.supervisor.restore = restore
        assert await lendings.step() == ALL_ROWS
        assert lendings.supervisor.lendable == []
        assert sum("checksum of bucket 3" in line for line in lendings.events.lines) == 2
        assert await lendings.step(1) == ALL_ROWS

    run(main)


def test_lent_replicas_generate_though_the_only_other_one_is_being_restarted(monkeypatch):
    monkeypatch.setattr(replica_supervisor, "RETRY_S", 0.01)

    async def main():
        lendings = LendingRun([SleepingReplica()], own_s=0.05, wake_s=0.05)
        restarted = SleepingReplica()
        may_start = asyncio.Event()

        async def start() -> tuple[int, list]:
            await may_start.wait()
            return 8, []

        restarted.start = ActorMethod(lambda former: start())
        lendings.supervisor.respawn = lambda i: restarted
        await lendings.group.setup()
        generating = asyncio.create_task(lendings.step())
        await asyncio.sleep(0.03)
        lendings.supervisor.mark_failed(0, "it died before the lent one served")
        await asyncio.sleep(0.1)
        may_start.set()  # so late that the lent one has served since
        assert lendings.lent[0].work or lendings.lent[0].rows
        assert await asyncio.wait_for(generating, 10) == ALL_ROWS

    run(main)


def test_a_trainer_that_is_found_dead_ends_the_attempt():
    async def main():
        lendings = LendingRun([SleepingReplica()], own_s=0.05)
        await lendings.group.setup()

        async def restore(*numbers: int, begun: asyncio.Event | None = None) -> bool:
            raise TrainerDied("trainer rank 0 is gone")

        lendings.supervisor.restore = restore
        with pytest.raises(TrainerDied):
            await lendings.step()

    run(main)


def test_no_prompt_is_lost_or_repeated_whenever_the_loan_ends():
    """The trainer's batch is complete at any moment; another call goes on generating, as an
    evaluation does, and lent replicas fail now and then."""

    async def one_round(seed: int) -> None:
        choose = random.Random(seed)
        lent = [SleepingReplica(choose.uniform(0, 0.02)) for _ in range(choose.randint(1, 3))]
        lendings = LendingRun(lent, own_s=0.003, wake_s=choose.uniform(0, 0.02))
        await lendings.group.setup()
        watch = asyncio.create_task(lendings.group.watch())
        group = lendings.group
        evaluation = group.generate(PROMPTS, "evaluation of v0", group.val_sampling)
        pending = asyncio.create_task(evaluation)
        for step in range(3):
            if choose.random() < 0.3:
                choose.choice(lent).fails_in = choose.choice(["rollout", "sync", "sleep"])
            prompts = PROMPTS[: choose.randint(1, 12)]
            expected = [(prompt.id[1], i) for prompt in prompts for i in range(2)]
            assert await lendings.step(step, prompts) == expected
        samples, _ = await pending
        assert [sample.prompt_id[1] for sample in samples] == list(range(12))
        assert group.restarts == 0
        watch.cancel()

    async def main():
        await asyncio.gather(*(one_round(seed) for seed in range(40)))

    run(main)


class TestChoice:
    @staticmethod
    def follow(
        choice: LendingChoice, with_loan: float, without: float, steps: int
    ) -> tuple[list[bool], list[str]]:
        """Whether each of these steps lent, and the lines. Each step takes as long as its kind."""
        seconds = {True: with_loan, False: without}
        kinds, lines = [], []
        for _ in range(steps):
            kinds.append(choice.lends_next)
            lines.append(choice.note(choice.lends_next, seconds[choice.lends_next]))
        return kinds, [line for line in lines if line]

    def test_both_kinds_are_tried_and_the_first_wake_up_does_not_count(self):
        choice = LendingChoice()
        assert choice.note(True, 60.0) == "", "it also connects"
        kinds, _ = self.follow(choice, 4.0, 8.0, 4)
        assert kinds == [True, False, True, False]
        assert choice.lends_next

    @pytest.mark.parametrize(
        ("wait_s", "wake_s", "return_s", "own", "lent", "pays"),
        [
            (10.0, 4.0, 1.5, 1, 4, True),
            (6.0, 2.0, 1.5, 2, 6, True),
            (10.0, 4.0, 3.0, 3, 1, False),
            (10.0, 3.0, 4.0, 4, 1, False),
        ],
        ids=["1 + 4", "2 + 6", "3 + 1, dear", "4 + 1, dear"],
    )
    def test_it_stays_with_what_is_shorter_though_a_loan_shortens_the_wait(
        self, wait_s, wake_s, return_s, own, lent, pays
    ):
        with_loan = wake_s + (wait_s - wake_s) * own / (own + lent) + return_s
        choice = LendingChoice()
        choice.note(True, 2 * with_loan)
        self.follow(choice, with_loan, wait_s, 4)
        kinds, lines = self.follow(choice, with_loan, wait_s, 1000)
        assert lines == [], "nothing has changed"
        trials = kinds.count(not pays)
        assert 10 <= trials <= 50
        best, other = sorted([with_loan, wait_s])
        assert trials * (other - best) < 0.05 * 1000 * best

    def test_a_trial_is_the_rarer_the_dearer_it_is(self):
        choice = LendingChoice()
        self.follow(choice, 60.0, 1.0, 5)
        kinds, _ = self.follow(choice, 60.0, 1.0, 3000)
        assert 1 <= kinds.count(True) <= 3

    def test_it_says_when_measured_times_change_the_choice(self):
        choice = LendingChoice()
        _, lines = self.follow(choice, 1.5, 0.8, 10)
        assert lines == [
            "lending: off, the trainer waits for its batch and its devices 1.5 s a step with a "
            "loan, and 0.8 s without"
        ]
        kinds, lines = self.follow(choice, 2.5, 5.0, 60)
        assert len(lines) == 1
        assert lines[0].startswith("lending: on, the trainer waits for its batch and its devices ")
        assert kinds[-10:] == [True] * 10

    def test_noise_of_a_few_percent_changes_nothing(self):
        choice = LendingChoice()
        noise = random.Random(0)
        lines = ""
        for _ in range(500):
            lines += choice.note(choice.lends_next, noise.uniform(0.98, 1.02))
        assert lines == ""


def test_with_all_lent_replicas_given_up_there_is_neither_a_hint_nor_a_choice(monkeypatch):
    monkeypatch.setattr(lending, "LONG_WAIT_S", 0.0)

    async def main():
        lendings = LendingRun([SleepingReplica()])
        await lendings.group.setup()
        lendings.supervisor.drop_lent(1, "it died")
        lendings.events.lines.clear()
        for step in range(8):
            assert await lendings.step(step, PROMPTS[:2]) == ALL_ROWS[:4]
        assert lendings.events.lines == []
        assert lendings.lending.choice.lends_next, "no step was compared"
        assert lendings.lending.metrics["lend/seconds"] == 0

    run(main)
