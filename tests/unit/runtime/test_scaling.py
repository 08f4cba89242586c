"""Requests to change the number of rollout replicas, from the command to the answer: with the real
supervisor, and stand-ins for placement groups and Ray actors."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from one_step_off.cluster.errors import TrainerDied
from one_step_off.config.command_line import exit_code
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.rollout import replica_supervisor
from one_step_off.runtime import scaling
from one_step_off.runtime.run_folder import LOCK_FILE
from one_step_off.runtime.scaling import ReplicaScaler, ScaleRequest, read_answers
from one_step_off.tools import scale
from tests.chaos.scaling import ScaleChanges
from tests.unit.rollout.test_replica_supervisor import PROMPTS, MortalReplica, group_of
from tests.unit.stand_ins import ActorMethod, RecordedEvents


class Engines:
    """In place of `PersistentActors`: `free` devices, and replicas that start in `start_s`."""

    def __init__(self, replicas: int = 1, free: int = 2, start_s: float = 0.0) -> None:
        self.free = free
        self.start_s = start_s
        self.start_error: Exception | None = None
        self.rollout = group_of([MortalReplica() for _ in range(replicas)], respawn=self.spawn)

    def spawn(self, index: int) -> Any:
        replica = MortalReplica()
        replica.start = ActorMethod(self.start_error or (8, []), self.start_s)
        return replica

    def reserve_replicas(self, count: int) -> None:
        if count > self.free:
            raise ConfigError(f"needs {count} CPUs, but the cluster has {self.free} free")
        self.free -= count

    def join(self) -> int:
        return self.rollout.supervisor.join(self.spawn)

    async def leave(self, index: int, limit_s: float) -> bool:
        left = await self.rollout.supervisor.leave(index, limit_s)
        self.free += left
        return left


@pytest.fixture
def run_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    """Of a run that owns its folder."""
    monkeypatch.setattr(scaling, "POLL_S", 0.01)
    monkeypatch.setattr(scale, "POLL_S", 0.01)
    cfg = Config()
    cfg.trainer.output_dir = str(tmp_path)
    cfg.placement.pools = {"rollout": [1], "actor": [1]}
    cfg.placement.roles = {"rollout": "rollout", "actor": "actor"}
    with open(tmp_path / LOCK_FILE, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield cfg


async def command(cfg: Config, change: str, timeout_s: float = 20.0) -> int:
    """The exit code of the command."""
    arguments = [cfg.trainer.output_dir, change, f"--timeout={timeout_s}"]
    try:
        return await asyncio.to_thread(scale.main, arguments)
    except ConfigError as error:
        print(error)
        return 2


def run_commands(
    cfg: Config, engines: Any, *changes: str, events: RecordedEvents | None = None
) -> list[int]:
    """The exit codes of commands, one after another, while a run has these engines."""

    async def main() -> list[int]:
        scaler = ReplicaScaler(cfg, events or RecordedEvents(), resumed=False)
        with scaler.watching(engines):
            return [await command(cfg, change) for change in changes]

    return asyncio.run(main())


def open_requests(cfg: Config) -> list[str]:
    names = [path.name for path in Path(cfg.trainer.output_dir).iterdir()]
    return [name for name in names if "scale.json" in name and name != scaling.ANSWERS_FILE]


def test_replicas_join_and_leave_as_the_command_asks(run_config, capsys):
    engines = Engines()
    assert run_commands(run_config, engines, "rollout=+2", "rollout=-1", "rollout=1") == [0, 0, 0]
    assert engines.rollout.active == [0], "the highest numbers leave first"
    assert engines.free == 2
    assert open_requests(run_config) == []
    assert capsys.readouterr().out.splitlines() == [
        "rollout=+2: rollout replicas: 1 -> 3",
        "rollout replicas: 3",
        "rollout=-1: rollout replicas: 3 -> 2",
        "rollout replicas: 2",
        "rollout=1: rollout replicas: 2 -> 1",
        "rollout replicas: 1",
    ]
    answers = read_answers(Path(run_config.trainer.output_dir))
    assert [answer.replicas for answer in answers] == [1, 3, 3, 2, 2, 1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("rollout=-1", "rollout=-1: would leave 0 rollout replicas of 1; a run has from 1 to 1024"),
        ("rollout=0", "would leave 0 rollout replicas"),
        ("rollout=+9999", "would leave 10000 rollout replicas"),
        ("rollout=+3", "rollout=+3: needs 3 CPUs, but the cluster has 2 free"),
        ("actor=+1", "actor=+1: only rollout replicas come and go"),
        ("rolout=+1", "rolout=+1: unknown role; did you mean rollout?"),
        ("judge=+1", "judge=+1: unknown role; use rollout"),
        ("rollout", "rollout: must be rollout=+2, rollout=-1 or rollout=3"),
        ("rollout=two", "rollout=two: must be as +2, -1 or 3"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(run_config, capsys, change, words):
    engines = Engines()
    assert run_commands(run_config, engines, change, "rollout=+1") == [2, 0]
    line = next(line for line in capsys.readouterr().out.splitlines() if words in line)
    assert line
    assert engines.rollout.active == [0, 1]


@pytest.mark.parametrize(
    ("pools", "roles", "words"),
    [
        ({"all": [1]}, {"rollout": "all", "actor": "all"}, "share the pool all with actor"),
        (
            {"rollout": [0.5], "actor": [0.5]},
            {"rollout": "rollout", "actor": "actor"},
            "the pool rollout has a share of a device",
        ),
    ],
)
def test_replicas_on_the_devices_of_others_do_not_come_and_go(
    run_config, capsys, pools, roles, words
):
    run_config.placement.pools = pools
    run_config.placement.roles = roles
    assert run_commands(run_config, Engines(), "rollout=+1") == [2]
    assert words in capsys.readouterr().out


def test_a_run_without_engines_refuses(run_config, capsys):
    assert run_commands(run_config, None, "rollout=+1") == [2]
    assert "this run has no engines" in capsys.readouterr().out


def test_without_a_run_the_command_is_refused_at_once(tmp_path, capsys):
    (tmp_path / LOCK_FILE).write_text("pid 1\n")  # of a run that was killed
    for folder in (tmp_path, tmp_path / "none"):
        assert exit_code(scale.main, [str(folder), "rollout=+1"]) == 2
        assert "no run is in progress in this folder" in capsys.readouterr().err


def test_a_run_that_does_not_answer_in_time_never_gets_the_request(run_config, capsys):
    assert asyncio.run(command(run_config, "rollout=+1", timeout_s=0.1)) == 1
    assert "it is withdrawn" in capsys.readouterr().out
    assert open_requests(run_config) == []


def test_the_command_ends_with_the_run(run_config, capsys, monkeypatch):
    async def main() -> int:
        waiting = asyncio.create_task(command(run_config, "rollout=+1"))
        await asyncio.sleep(0.1)
        monkeypatch.setattr(scale, "is_running", lambda folder: False)
        return await waiting

    assert asyncio.run(main()) == 1
    assert "the run has ended before it was done" in capsys.readouterr().out


def test_one_change_at_a_time(run_config, capsys):
    async def main() -> list[int]:
        scaler = ReplicaScaler(run_config, RecordedEvents(), resumed=False)
        with scaler.watching(Engines(start_s=0.3)):
            first = asyncio.create_task(command(run_config, "rollout=+1"))
            await asyncio.sleep(0.1)
            second = await command(run_config, "rollout=+1")
            return [await first, second]

    assert asyncio.run(main()) == [0, 2]
    assert "another change is under way" in capsys.readouterr().out


def test_a_replica_that_never_starts_is_removed_again_and_the_command_says_why(run_config, capsys):
    engines = Engines()
    engines.start_error = RuntimeError("no memory")
    assert run_commands(run_config, engines, "rollout=+1") == [1]
    words = "rollout replicas: 1; rollout 1, start: RuntimeError: no memory"
    assert words in capsys.readouterr().out
    assert engines.rollout.supervisor.members == [0]
    assert engines.free == 2
    engines.start_error = None
    assert run_commands(run_config, engines, "rollout=+1") == [0]


@pytest.mark.parametrize("change", ["rollout=+1", "rollout=-1"])
def test_the_next_attempt_ends_what_a_trainers_death_interrupts(run_config, change):
    """Its engines may be the same ones or others; others are as many as were asked for."""

    async def main() -> tuple[int, int]:
        scaler = ReplicaScaler(run_config, RecordedEvents(), resumed=False)
        engines = Engines(replicas=2, start_s=30.0)
        engines.rollout.supervisor.loads[1].sent = 1  # it has something to return first
        with scaler.watching(engines):
            asked = asyncio.create_task(command(run_config, change))
            while scaler.target is None:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
        assert not asked.done()
        others = Engines(replicas=scaler.target)
        with scaler.watching(others):
            return await asked, len(others.rollout.active)

    assert asyncio.run(main()) == (0, 3 if change == "rollout=+1" else 1)


def test_a_trainers_death_is_no_failure_of_the_replica_that_joins(run_config):
    """`ReplicaSupervisor.watch` ends the attempt then, and the next one goes on."""

    async def main() -> None:
        scaler = ReplicaScaler(run_config, RecordedEvents(), resumed=False)
        engines = Engines()

        async def restore(i: int) -> bool:
            raise TrainerDied("trainer rank 0 hangs")

        engines.rollout.supervisor.restore = restore
        scaling.write_request(scaler.folder, ScaleRequest.parse("rollout=+1"))
        with scaler.watching(engines):
            await asyncio.sleep(0.3)
        assert scaler.request is not None
        assert scaler.target == 2
        assert engines.rollout.supervisor.members == [0, 1]

    asyncio.run(main())


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"rollout": "many"}', '{"rollout": null}'])
def test_a_file_that_is_no_request_is_refused_and_removed(run_config, content):
    async def main() -> None:
        scaler = ReplicaScaler(run_config, RecordedEvents(), resumed=False)
        path = scaler.folder / scaling.REQUEST_FILE
        path.write_text(content)
        with scaler.watching(Engines()):
            while path.exists():
                await asyncio.sleep(0.01)
            assert read_answers(scaler.folder)[-1].state == scaling.REFUSED
            path.write_text('{"rollout": 2}')  # as a person may write it
            while path.exists():
                await asyncio.sleep(0.01)
        assert read_answers(scaler.folder)[-1].replicas == 2

    asyncio.run(main())


def test_a_disk_that_takes_no_answer_ends_nothing(run_config):
    engines = Engines()
    folder = Path(run_config.trainer.output_dir)
    (folder / scaling.ANSWERS_FILE).mkdir()
    events = RecordedEvents()

    async def main() -> None:
        scaler = ReplicaScaler(run_config, events, resumed=True)
        scaling.write_request(folder, ScaleRequest.parse("rollout=+1"))
        with scaler.watching(engines):
            await asyncio.sleep(0.2)
        assert scaler.request is None

    asyncio.run(main())
    assert open_requests(run_config) == []


def test_a_run_that_is_started_again_has_the_number_of_the_config_and_says_so(run_config):
    run_commands(run_config, Engines(), "rollout=+1")
    folder = Path(run_config.trainer.output_dir)
    request = folder / scaling.REQUEST_FILE
    request.write_text(json.dumps({"rollout": "+5", "id": "old"}))
    os.utime(request, (1.0, 1.0))
    events = RecordedEvents()
    scaler = ReplicaScaler(run_config, events, resumed=True)
    assert scaler.target is None
    assert events.lines == [
        "the run begins with the 1 rollout replicas of the config; before it had 2: "
        f"python -m one_step_off.scale {folder} rollout=2"
    ]
    assert open_requests(run_config) == [], "nobody waits for it any more"
    ReplicaScaler(run_config, events, resumed=False)
    assert not (folder / scaling.ANSWERS_FILE).exists()


def test_a_request_to_a_run_that_is_starting_is_carried_out(run_config):
    async def main() -> int:
        waiting = asyncio.create_task(command(run_config, "rollout=+1"))
        while not open_requests(run_config):
            await asyncio.sleep(0.01)
        scaler = ReplicaScaler(run_config, RecordedEvents(), resumed=False)
        with scaler.watching(Engines()):
            return await waiting

    assert asyncio.run(main()) == 0


@pytest.mark.parametrize("id", ["5", "null", '"4f"', None])
def test_a_request_is_carried_out_once_whatever_its_id_and_though_it_cannot_be_removed(
    run_config, monkeypatch, id
):
    monkeypatch.setattr(Path, "unlink", lambda *args, **options: None)
    fields = '"rollout": "+1"' + (f', "id": {id}' if id else "")
    engines = Engines(free=9)

    async def main() -> None:
        scaler = ReplicaScaler(run_config, RecordedEvents(), resumed=False)
        path = scaler.folder / scaling.REQUEST_FILE
        with scaler.watching(engines):
            for _ in range(2):
                path.write_text(f"{{{fields}}}")
                await asyncio.sleep(0.3)

    asyncio.run(main())
    assert scaling.number_of(engines) == 3


@pytest.mark.parametrize("id", ["5", "null"])
def test_the_command_withdraws_a_request_whatever_its_id(run_config, id):
    path = Path(run_config.trainer.output_dir) / scaling.REQUEST_FILE
    path.write_text(f'{{"rollout": "+1", "id": {id}}}')
    scaling.withdraw_request(path.parent, ScaleRequest.read(path))
    assert not path.exists()


def test_a_second_request_without_an_id_is_answered_too(run_config):
    async def main() -> None:
        scaler = ReplicaScaler(run_config, RecordedEvents(), resumed=False)
        path = scaler.folder / scaling.REQUEST_FILE
        with scaler.watching(Engines(start_s=0.2)):
            path.write_text('{"rollout": 2}')
            while scaler.request is None:
                await asyncio.sleep(0.01)
            path.write_text('{"rollout": 3}')
            while path.exists():
                await asyncio.sleep(0.01)
        answers = read_answers(scaler.folder)
        assert [answer.replicas for answer in answers if answer.state == "done"] == [2, 3]

    asyncio.run(main())


@pytest.mark.parametrize("line", ['{"time": 1.0, "id\n', '{"time": 1.0}\n', '{"time": 1.0, "id'])
def test_a_line_that_was_cut_off_hides_no_answer(run_config, line):
    folder = Path(run_config.trainer.output_dir)
    (folder / scaling.ANSWERS_FILE).write_text(line)

    async def main() -> int:
        scaler = ReplicaScaler(run_config, RecordedEvents(), resumed=True)
        with scaler.watching(Engines()):
            return await command(run_config, "rollout=+1")

    assert asyncio.run(main()) == 0
    assert [answer.state for answer in read_answers(folder)] == ["begun", "done"]


def test_a_replica_that_was_excluded_does_not_count_and_another_takes_its_place(run_config, capsys):
    engines = Engines(replicas=3, free=0)

    async def main() -> int:
        scaler = ReplicaScaler(run_config, RecordedEvents(), resumed=False)
        engines.rollout.supervisor.exclude(1, "its device is broken")
        with scaler.watching(engines):
            return await command(run_config, "rollout=3")

    assert asyncio.run(main()) == 0
    assert engines.rollout.serving == 3
    assert "rollout=3: rollout replicas: 2 -> 3" in capsys.readouterr().out


def test_where_no_weights_are_kept_the_command_waits_for_the_next_sync(run_config):
    engines = Engines()
    supervisor = engines.rollout.supervisor

    async def restore(i: int) -> bool:
        return True

    supervisor.restore = restore

    async def main() -> int:
        scaler = ReplicaScaler(run_config, RecordedEvents(), resumed=False)
        with scaler.watching(engines):
            waiting = asyncio.create_task(command(run_config, "rollout=+1"))
            while engines.rollout.active != [0, 1]:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            assert not waiting.done()
            supervisor.mark_synced(1, engines.rollout.replicas[1])
            return await waiting

    assert asyncio.run(main()) == 0


def test_what_the_next_attempt_has_no_room_for_has_failed(run_config, capsys):
    """It cannot be refused any more: "refused" says that nothing has changed."""

    async def main() -> int:
        scaler = ReplicaScaler(run_config, RecordedEvents(), resumed=False)
        with scaler.watching(Engines(start_s=30.0)):
            asked = asyncio.create_task(command(run_config, "rollout=+2"))
            while scaler.target is None:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
        with scaler.watching(Engines(replicas=2, free=0)):
            code = await asked
        assert scaler.target == 2
        return code

    assert asyncio.run(main()) == 1
    assert "needs 1 CPUs, but the cluster has 0 free" in capsys.readouterr().out


class KilledReplica(MortalReplica):
    """Every 7th dies in its start, every 9th in its first sync, and one in each 25th call: so none
    three times in a row, which would exclude it, or end the run."""

    def __init__(self, rng: random.Random, number: int, calls: Iterator[int]) -> None:
        super().__init__()
        self.rng = rng
        self.number = number
        self.calls = calls
        self.start = ActorMethod(self.begin)

    async def begin(self, former: Any) -> tuple[int, list]:
        await asyncio.sleep(self.rng.uniform(0, 0.02))
        if self.number % 7 == 6:
            raise RuntimeError("killed in its start")
        return 8, []

    async def generate(self, prompts: Any, sampling: Any) -> Any:
        await asyncio.sleep(self.rng.uniform(0, 0.02))
        if next(self.calls) % 25 == 24:
            self.dead = True
            raise RuntimeError("killed")
        return await super().generate(prompts, sampling)


class KilledEngines(Engines):
    """With such replicas."""

    def __init__(self, rng: random.Random, routing: str) -> None:
        self.rng = rng
        self.free = 1000
        self.numbers = itertools.count()
        self.calls = itertools.count()
        replicas: list[Any] = [self.spawn(0), self.spawn(1)]
        self.rollout = group_of(replicas, routing, respawn=self.spawn, events=RecordedEvents())
        supervisor = self.rollout.supervisor
        pass_restore = supervisor.restore

        async def restore(i: int) -> bool:
            replica: Any = supervisor.replicas[i]
            return replica.number % 9 != 8 and await pass_restore(i)

        supervisor.restore = restore

    def spawn(self, index: int) -> Any:
        return KilledReplica(self.rng, next(self.numbers), self.calls)


@pytest.mark.parametrize("routing", ["static", "least_loaded"])
def test_two_hundred_joins_and_leaves_between_kills_lose_and_repeat_nothing(
    run_config, monkeypatch, routing
):
    monkeypatch.setattr(replica_supervisor, "RETRY_S", 0.002)
    rng = random.Random(7)
    events = RecordedEvents()
    batches = 0

    async def generate_on_and_on(rollout: Any) -> None:
        nonlocal batches
        while True:
            samples, _ = await rollout.generate(PROMPTS, f"step {batches}", rollout.train_sampling)
            found = [(sample.prompt_id[1], sample.index) for sample in samples]
            assert found == [(row, i) for row in range(12) for i in range(2)]
            batches += 1

    async def main() -> tuple[int, int]:
        scaler = ReplicaScaler(run_config, events, resumed=False)
        engines = KilledEngines(rng, routing)
        training = asyncio.create_task(generate_on_and_on(engines.rollout))
        watch = asyncio.create_task(engines.rollout.watch())
        changed = 0
        with scaler.watching(engines):
            while changed < 200:
                present = scaling.number_of(engines)
                target = rng.choice([n for n in range(1, 6) if n != present])
                scaling.write_request(scaler.folder, ScaleRequest.parse(f"rollout={target}"))
                while open_requests(run_config):
                    await asyncio.sleep(0.005)
                    assert not training.done(), training.result()
                changed += abs(scaling.number_of(engines) - present)
        training.cancel()
        watch.cancel()
        answers = read_answers(scaler.folder)
        assert {answer.state for answer in answers} == {"begun", "done"}
        return engines.rollout.restarts, engines.rollout.serving

    restarts, serving = asyncio.run(asyncio.wait_for(main(), 200))
    assert restarts > 5
    assert serving >= 1
    assert batches > 50


def test_the_chaos_program_asks_by_the_real_command(run_config):
    folder = Path(run_config.trainer.output_dir)
    run: Any = SimpleNamespace(folder=folder)
    changes = ScaleChanges(run, seed=3, count=3)

    async def main() -> None:
        scaler = ReplicaScaler(run_config, RecordedEvents(), resumed=False)
        with scaler.watching(Engines(replicas=2)):
            changes.start()
            while not changes.are_done and not changes.wrong:
                await asyncio.sleep(0.05)
            await asyncio.to_thread(changes.stop)

    asyncio.run(main())
    assert changes.wrong == []
    assert changes.done[0] == 3
    assert sum(answer.state == "done" for answer in read_answers(folder)) == 3
