"""The order of launches: no schedule of the hosts deadlocks on any number of hardware queues."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from one_step_off.distributed_util import DedicatedGroup
from one_step_off.weight_sync import launch_order
from one_step_off.weight_sync.launch_order import Step, receive_steps, send_steps
from one_step_off.weight_sync.routes import Routes
from tests.unit.weight_sync.queue_model import Action, Machine, State, Thread
from tests.unit.weight_sync.weight_stream import (
    SHAPES,
    WeightStream,
    assert_no_errors,
    assert_received,
    random_weights,
)

SendSteps = tuple[Step, ...]
ReceiveSteps = Callable[[Iterable[int]], Iterable[tuple[Step, int]]]
Queues = Callable[[str, str], int]
"""(device, stream) -> the hardware queue of the stream."""


def steps_of_a_send(is_ordered: bool) -> SendSteps:
    return tuple(step for step, _ in send_steps([0], is_ordered))


ORDERED = (steps_of_a_send(True), lambda senders: receive_steps(senders, True))
UNORDERED = (steps_of_a_send(False), lambda senders: receive_steps(senders, False))
RECEIVE_STEPS = (Step.ANNOUNCE, Step.LAUNCH, Step.FINISH)
ANNOUNCED_SIDE_BY_SIDE = (
    steps_of_a_send(True),
    lambda senders: [(step, s) for step in RECEIVE_STEPS for s in senders],
)
ONE_AT_A_TIME_UNANNOUNCED = (
    steps_of_a_send(False),
    lambda senders: [(step, s) for s in senders for step in (Step.LAUNCH, Step.FINISH)],
)


def one_queue(device: str, stream: str) -> int:
    return 0


def own_queue_per_receiver_stream(device: str, stream: str) -> int:
    """Only the trainer's streams share a queue."""
    return 0 if device.startswith("trainer") else int(stream)


def by_kind(queue_of: dict[tuple[str, str], int]) -> Queues:
    """The same map on all ranks, and on all receivers."""
    return lambda device, stream: queue_of[device[:-1], stream]


def training_thread(rank: int, gathers: int, queues: Queues, waits_after: Iterable[int]) -> Thread:
    """A rank's own thread: collectives on two streams, and the host's waits for some of them."""
    device = f"trainer{rank}"
    actions = []
    for number in range(gathers):
        operation = ("gather", number)
        queue = queues(device, f"collectives{number % 2}")
        actions.append(Action(Step.LAUNCH, operation, queue))
        if number in waits_after:
            actions.append(Action(Step.FINISH, operation))
    return Thread(device, tuple(actions))


def sending_thread(rank: int, messages: int, queues: Queues, steps: SendSteps) -> Thread:
    device = f"trainer{rank}"
    actions = [
        Action(step, ("broadcast", device, message), queues(device, "send"))
        for message in range(messages)
        for step in steps
    ]
    return Thread(device, tuple(actions))


def receiving_thread(
    number: int, senders_of_message: list[list[int]], queues: Queues, steps: ReceiveSteps
) -> Thread:
    """`senders_of_message`: in the plan's order; each sender's messages are counted."""
    device = f"receiver{number}"
    actions = []
    received = dict.fromkeys(itertools.chain(*senders_of_message), 0)
    for senders in senders_of_message:
        for step, sender in steps(senders):
            operation = ("broadcast", f"trainer{sender}", received[sender])
            actions.append(Action(step, operation, queues(device, str(sender))))
            if step is Step.FINISH:
                received[sender] += 1
    return Thread(device, tuple(actions))


def machine(
    steps: tuple[SendSteps, ReceiveSteps],
    queues: Queues,
    ranks: int = 2,
    receivers: int = 1,
    gathers: int = 2,
    senders_of_message: list[list[int]] | None = None,
    waits_after: Iterable[int] = (),
    early_ends: bool = False,
) -> Machine:
    """Every rank trains and sends at once; by default two messages of each."""
    send, receive = steps
    plan = senders_of_message or [list(range(ranks))] * 2
    threads = []
    for rank in range(ranks):
        threads.append(training_thread(rank, gathers, queues, waits_after))
        messages = sum(rank in senders for senders in plan)
        threads.append(sending_thread(rank, messages, queues, send))
    for number in range(receivers):
        threads.append(receiving_thread(number, plan, queues, receive))
    return Machine(threads, early_ends)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("receivers", [1, 2])
def test_no_schedule_deadlocks_on_one_queue(ranks, receivers):
    """A complete search."""
    system = machine(ORDERED, one_queue, ranks, receivers, early_ends=True)
    assert system.find_deadlock() is None


def test_no_schedule_deadlocks_on_two_queues_however_streams_share_them():
    """A complete search for every map of a rank's three streams and a receiver's two streams."""
    streams = [("trainer", name) for name in ("collectives0", "collectives1", "send")]
    streams += [("receiver", "0"), ("receiver", "1")]
    for numbers in itertools.product(range(2), repeat=len(streams)):
        queue_of = dict(zip(streams, numbers, strict=True))
        system = machine(ORDERED, by_kind(queue_of), receivers=2)
        assert system.find_deadlock() is None, queue_of


@pytest.mark.parametrize(
    ("steps", "queues"),
    [
        (UNORDERED, one_queue),
        (UNORDERED, own_queue_per_receiver_stream),
        (ANNOUNCED_SIDE_BY_SIDE, one_queue),
        (ONE_AT_A_TIME_UNANNOUNCED, own_queue_per_receiver_stream),
    ],
    ids=[
        "neither rule",
        "neither rule, receivers with enough queues",
        "several receives at a time",
        "without announcements",
    ],
)
def test_without_one_of_the_rules_a_schedule_deadlocks(steps, queues):
    assert machine(steps, queues).find_deadlock() is not None


def test_several_receives_at_a_time_are_safe_if_each_has_a_queue_of_its_own_at_every_receiver():
    """What GPUs that guarantee this could use; CUDA does not."""
    system = machine(
        ANNOUNCED_SIDE_BY_SIDE, own_queue_per_receiver_stream, receivers=2, early_ends=True
    )
    assert system.find_deadlock() is None


def test_neither_rule_is_needed_while_the_trainer_launches_nothing():
    """As with weight_sync.overlap=false, but for a replica that comes back beside training."""
    system = machine(UNORDERED, one_queue, ranks=3, receivers=2, gathers=0)
    assert system.find_deadlock() is None


def test_receivers_that_take_the_senders_in_different_orders_deadlock():
    """The rules need one order at all receivers."""
    system = machine(ORDERED, one_queue, gathers=0)
    plan = [[1, 0], [1, 0]]
    system = Machine([*system.threads, receiving_thread(1, plan, one_queue, ORDERED[1])])
    assert system.find_deadlock() is not None


def routes_with(senders: int, rounds: list[list[set[int]]]) -> Routes:
    """The order of turns for these sets of receivers."""
    routes = Routes.__new__(Routes)
    routes.senders = senders
    routes._number_rounds([[tuple(sorted(members)) for members in together] for together in rounds])
    return routes


def machine_by_turns(
    routes: Routes, sent: list[set[tuple[int, int]]], gathers: int = 2, by_turns: bool = True
) -> Machine:
    """Ranks that train and send, and receivers, on one queue each.

    Args:
        routes: the sets, and their turns.
        sent: per bucket the (sender, set) that have a message.
        gathers: collectives of each rank.
        by_turns: else senders take the turns of a bucket backwards.
    """
    turn = lambda stream: routes.turn(*stream)  # noqa: E731
    threads = []
    for rank in range(routes.senders):
        threads.append(training_thread(rank, gathers, one_queue, ()))
        actions = []
        for bucket, streams in enumerate(sent):
            own = [stream for stream in streams if stream[0] == rank]
            own.sort(key=turn, reverse=not by_turns)
            for step, (_, number) in send_steps_of(own):
                actions.append(Action(step, ("broadcast", bucket, rank, number)))
        threads.append(Thread(f"trainer{rank}", tuple(actions)))
    for receiver in sorted(set().union(*routes.sets)):
        actions = []
        for bucket, streams in enumerate(sent):
            own = [stream for stream in streams if receiver in routes.sets[stream[1]]]
            for stream in sorted(own, key=turn):
                operation = ("broadcast", bucket, *stream)
                actions += [Action(step, operation) for step in RECEIVE_STEPS]
        threads.append(Thread(f"receiver{receiver}", tuple(actions)))
    return Machine(threads, early_ends=True)


def send_steps_of(streams: list[tuple[int, int]]) -> Iterable[tuple[Step, tuple[int, int]]]:
    for step, place in send_steps(range(len(streams)), True):
        yield step, streams[place]


TWO_RANKS = [[{0, 1}], [{0}, {1}]]
"""All receivers, and each of two tensor-parallel ranks."""


@pytest.mark.parametrize(
    "sent",
    [
        [{(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)}],
        [{(0, 1), (1, 2)}, {(0, 2), (1, 1)}],
        [{(0, 1), (0, 2), (1, 2)}, {(1, 0), (0, 0)}],
        [{(1, 1)}, {(0, 0), (1, 2)}, {(1, 1), (0, 2)}],
    ],
)
def test_no_schedule_deadlocks_if_receivers_get_different_parts(sent):
    """A complete search."""
    assert machine_by_turns(routes_with(2, TWO_RANKS), sent).find_deadlock() is None


def test_senders_that_take_the_turns_in_another_order_than_receivers_deadlock():
    sent = [{(sender, number) for sender in range(2) for number in (1, 2)}]
    system = machine_by_turns(routes_with(2, TWO_RANKS), sent, 0, by_turns=False)
    assert system.find_deadlock() is not None


@settings(max_examples=100, deadline=None)
@given(st.data(), st.randoms(use_true_random=False))
def test_random_schedules_by_turns_reach_the_end(data, rng):
    """Up to four senders and four ranks, of which neighbors may share a part."""
    senders = data.draw(st.integers(1, 4))
    ranks = data.draw(st.sampled_from([1, 2, 4]))
    rounds = [[set(range(ranks))], [{rank} for rank in range(ranks)]]
    if ranks == 4:
        rounds.append([{0, 1}, {2, 3}])
    routes = routes_with(senders, rounds)
    streams = [(s, number) for s in range(senders) for number in range(len(routes.sets))]
    sent = data.draw(st.lists(st.sets(st.sampled_from(streams), min_size=1), max_size=4))
    system = machine_by_turns(routes, sent, data.draw(st.integers(0, 4)))
    assert system.is_finished(run_randomly(system, rng))


@given(st.integers(1, 9), st.integers(1, 9))
def test_in_a_turn_each_sender_and_each_receiver_has_one_message(senders, ranks):
    routes = routes_with(senders, [[set(range(ranks))], [{rank} for rank in range(ranks)]])
    pairs_of_turn: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for sender in range(senders):
        for number in range(1, ranks + 1):
            pairs_of_turn.setdefault(routes.turn(sender, number), []).append((sender, number))
    for pairs in pairs_of_turn.values():
        assert len({sender for sender, _ in pairs}) == len(pairs)
        assert len({number for _, number in pairs}) == len(pairs)
    assert len(pairs_of_turn) == max(senders, ranks), "no turn more than needed"


def run_randomly(system: Machine, rng: random.Random) -> State:
    """The last state of a random schedule."""
    state = system.start()
    while choices := list(system.choices(state)):
        state = rng.choice(choices)()
    return state


QUEUE_COUNTS = st.integers(1, 32)


@st.composite
def systems(draw, steps=ORDERED, queue_counts=QUEUE_COUNTS) -> tuple[int, Machine]:
    """The number of queues, and a machine: 2 to 4 ranks, of which some send, 1 to 3 receivers, and
    streams on at most three of the queues, so that they meet."""
    queue_count = draw(queue_counts)
    used = draw(st.lists(st.integers(0, queue_count - 1), min_size=1, max_size=3, unique=True))
    ranks = draw(st.integers(2, 4))
    queue_of: dict[tuple[str, str], int] = {}

    def queues(device: str, stream: str) -> int:
        key = (device, stream)
        if key not in queue_of:
            queue_of[key] = draw(st.sampled_from(used))
        return queue_of[key]

    senders = st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks, unique=True)
    system = machine(
        steps,
        queues,
        ranks,
        receivers=draw(st.integers(1, 3)),
        gathers=draw(st.integers(0, 6)),
        senders_of_message=draw(st.lists(senders.map(sorted), min_size=1, max_size=5)),
        waits_after=draw(st.sets(st.integers(0, 5))),
        early_ends=draw(st.booleans()),
    )
    return queue_count, system


@settings(max_examples=150, deadline=None)
@given(systems(), st.randoms(use_true_random=False))
def test_random_schedules_on_1_to_32_queues_reach_the_end(drawn, rng):
    queue_count, system = drawn
    assert system.is_finished(run_randomly(system, rng)), f"{queue_count} queues"


@pytest.mark.parametrize("queue_count", [1, 4, 32])
def test_the_same_random_schedules_find_the_deadlock_of_the_design_without_rules(queue_count):
    """So that the test above can fail, on many queues too."""
    drawn = st.tuples(systems(UNORDERED, st.just(queue_count)), st.randoms(use_true_random=False))

    def deadlocks(example) -> bool:
        (_, system), rng = example
        return not system.is_finished(run_randomly(system, rng))

    quick = settings(max_examples=1000, deadline=None, phases=[Phase.generate], database=None)
    find(drawn, deadlocks, settings=quick)  # raises NoSuchExample


def record_steps(monkeypatch, recorded: list[tuple[DedicatedGroup, Step]]) -> None:
    """Let the real groups note their steps."""
    step_of_method = {
        "announce": Step.ANNOUNCE,
        "await_receivers": Step.AWAIT_RECEIVERS,
        "start_send": Step.LAUNCH,
        "start_receive": Step.LAUNCH,
        "wait": Step.FINISH,
    }
    lock = threading.Lock()

    def noting(method: Callable, step: Step) -> Callable:
        def call(group, *args):
            result = method(group, *args)
            with lock:
                recorded.append((group, step))
            return result

        return call

    for name, step in step_of_method.items():
        method = noting(getattr(DedicatedGroup, name), step)
        monkeypatch.setattr(DedicatedGroup, name, method)


def real_threads(stream: WeightStream, recorded: list) -> list[Thread]:
    """What each real endpoint's wire thread did, as threads of the model on one queue."""
    threads = []
    for endpoint in (*stream.senders, *stream.receivers):
        is_sender = endpoint in stream.senders
        device = f"trainer{endpoint.index}" if is_sender else f"receiver{endpoint.index}"
        sender_of = {}
        for number, group in enumerate(endpoint.ends):
            sender_of[id(group)] = endpoint.index if is_sender else number
        finished = dict.fromkeys(sender_of.values(), 0)
        actions = []
        for group, step in recorded:
            if id(group) in sender_of:
                sender = sender_of[id(group)]
                operation = ("broadcast", f"trainer{sender}", finished[sender])
                actions.append(Action(step, operation))
                finished[sender] += step is Step.FINISH
        threads.append(Thread(device, tuple(actions)))
    return threads


@pytest.mark.parametrize("mode", ["full", "delta"])
@pytest.mark.parametrize("is_ordered", [True, False])
def test_what_real_senders_and_receivers_do_is_free_of_deadlocks_if_ordered(
    monkeypatch, is_ordered, mode
):
    """Two whole syncs over gloo, recorded, and searched as if each process had one queue."""
    monkeypatch.setitem(launch_order.IS_ORDERED, "cpu", is_ordered)
    stream = WeightStream(SHAPES, 2, 2, bucket_bytes=160, dtype="bfloat16")
    for sender in stream.senders:
        sender.full_every = 20 if mode == "delta" else 0
    recorded: list = []
    record_steps(monkeypatch, recorded)
    weights = random_weights(SHAPES, "bfloat16")
    for version in range(2):
        results, received = stream.sync(weights, version)
        assert_no_errors(results)
        assert_received(received, weights)
    threads = real_threads(stream, recorded)
    assert all(len(thread.actions) > 12 for thread in threads)
    for rank in range(2):
        threads.append(training_thread(rank, 2, one_queue, ()))
    deadlock = Machine(threads).find_deadlock()
    assert (deadlock is None) == is_ordered


def test_the_rules_hold_on_gpus():
    assert launch_order.IS_ORDERED["cuda"]


@pytest.fixture
def ordered(monkeypatch):
    """The rules of GPUs, on CPUs."""
    monkeypatch.setitem(launch_order.IS_ORDERED, "cpu", True)


def test_ordered_syncs_where_some_receivers_share_a_device_and_others_join_later(ordered):
    stream = WeightStream(SHAPES, 3, 2, same_device=[[0], [], [1]])
    for sender in stream.senders:
        sender.keep_sent = True
    weights = random_weights(SHAPES)
    results, received = stream.sync(weights, 0)
    assert_no_errors(results)
    assert_received(received, weights)

    stream.receivers.append(stream.new_receiver(2))
    stream.connect(2, [[0], [2], [1]])
    results, received = stream.sync(random_weights(SHAPES), 0)  # sent again, as it was
    assert_no_errors(results)
    assert_received(received, weights)


def test_a_sender_whose_receivers_never_get_ready_ends_in_time(ordered):
    stream = WeightStream(SHAPES, 1, 2, timeout_s=1.0)
    begin = time.monotonic()
    results, _ = stream.sync(
        random_weights(SHAPES), 0, change_jobs=lambda jobs: jobs.__setitem__(2, lambda: None)
    )
    assert "phase header" in str(results[0])
    assert "not all receivers were ready in 1 s" in str(results[0])
    assert time.monotonic() - begin < 6


def test_an_abort_ends_the_wait_for_receivers(ordered):
    stream = WeightStream(SHAPES, 1, 1, timeout_s=60.0)
    threading.Timer(0.3, stream.senders[0].abort, [1, "rollout 0 died"]).start()
    begin = time.monotonic()
    results, _ = stream.sync(
        random_weights(SHAPES), 0, change_jobs=lambda jobs: jobs.__setitem__(1, lambda: None)
    )
    assert "rollout 0 died" in str(results[0])
    assert time.monotonic() - begin < 6
