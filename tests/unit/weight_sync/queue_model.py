"""A model of GPUs whose streams share hardware queues, and a search for schedules that deadlock.

The kernels of a queue run one after another, in the order of their launch. (Real queues hold up
less: a kernel may start beside one of another stream that has started. So what is safe here is safe
there.) A collective's kernel stays at the head of its queue until the kernels of all members are at
the heads of theirs. A broadcast may end earlier at a member, as NCCL buffers small messages, but
nothing may rely on that.

Hosts have threads, whose steps interleave in any order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from one_step_off.weight_sync.launch_order import Step

Operation = tuple
"""A collective: (kind, ...)."""


@dataclasses.dataclass(frozen=True)
class Action:
    """One step of a host thread."""

    step: Step
    operation: Operation
    queue: int = 0
    """Of a launch: the hardware queue that the stream is mapped to."""


@dataclasses.dataclass(frozen=True)
class Thread:
    """A host thread of a device."""

    device: str
    actions: tuple[Action, ...]


@dataclasses.dataclass(frozen=True)
class State:
    """What has happened so far; only what later steps depend on."""

    positions: tuple[int, ...]
    """Of each thread: the number of its next action."""
    queues: frozenset[tuple[str, int, tuple[Operation, ...]]]
    """(device, queue, kernels that have not completed)."""
    done: frozenset[tuple[Operation, str]]
    """Operations that have completed at a device."""
    announced: frozenset[tuple[Operation, str]]


class Machine:
    """Host threads, and the devices on which they launch."""

    def __init__(self, threads: list[Thread], early_ends: bool = False) -> None:
        """`early_ends`: a broadcast may also end at a member before all have started it."""
        self.threads = threads
        self.early_ends = early_ends
        self.members: dict[Operation, set[str]] = {}
        self.receivers: dict[Operation, set[str]] = {}
        for thread in threads:
            for action in thread.actions:
                if action.step is Step.LAUNCH:
                    self.members.setdefault(action.operation, set()).add(thread.device)
                if action.step is Step.ANNOUNCE:
                    self.receivers.setdefault(action.operation, set()).add(thread.device)

    def start(self) -> State:
        state = State((0,) * len(self.threads), frozenset(), frozenset(), frozenset())
        return self.settle(state)

    def is_finished(self, state: State) -> bool:
        """Whether every thread is at its end."""
        ends = tuple(len(thread.actions) for thread in self.threads)
        return state.positions == ends

    def settle(self, state: State) -> State:
        """Do everything that happens in any case and whose time changes nothing: all but
        launches."""
        while True:
            following = self._complete(self._advance_hosts(state))
            if following == state:
                return state
            state = following

    def choices(self, state: State) -> Iterator[Callable[[], State]]:
        """What may happen next, and whose order matters."""
        for number, thread in enumerate(self.threads):
            action = self._next_action(state, number)
            if action and action.step is Step.LAUNCH:
                yield lambda n=number, t=thread, a=action: self._launch(state, n, t, a)
        if self.early_ends:
            for operation, device in self._early_ends(state):
                yield lambda o=operation, d=device: self.settle(self._end(state, o, d))

    def find_deadlock(self, limit: int = 2_000_000) -> State | None:
        """Search every schedule. Returns a state in which some thread waits for ever, or None."""
        first = self.start()
        seen = {first}
        waiting = [first]
        while waiting:
            state = waiting.pop()
            if self.is_stuck(state):
                return state
            for choose in self.choices(state):
                following = choose()
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)
            assert len(seen) < limit, "too many states for a complete search"
        return None

    def is_stuck(self, state: State) -> bool:
        """Whether nothing must happen any more, though a thread is not at its end."""
        can_launch = any(
            action and action.step is Step.LAUNCH
            for action in (self._next_action(state, n) for n in range(len(self.threads)))
        )
        return not can_launch and not self.is_finished(state)

    def _next_action(self, state: State, number: int) -> Action | None:
        actions = self.threads[number].actions
        position = state.positions[number]
        return actions[position] if position < len(actions) else None

    def _advance_hosts(self, state: State) -> State:
        positions = list(state.positions)
        announced = set(state.announced)
        for number, thread in enumerate(self.threads):
            while positions[number] < len(thread.actions):
                action = thread.actions[positions[number]]
                if action.step is Step.ANNOUNCE:
                    announced.add((action.operation, thread.device))
                elif not self._may_pass(action, thread.device, state.done, announced):
                    break
                positions[number] += 1
        return dataclasses.replace(
            state, positions=tuple(positions), announced=frozenset(announced)
        )

    def _may_pass(self, action: Action, device: str, done: frozenset, announced: set) -> bool:
        """Whether a host passes an action that is neither an announcement nor a launch."""
        operation = action.operation
        if action.step is Step.FINISH:
            return (operation, device) in done
        if action.step is Step.AWAIT_RECEIVERS:
            receivers = self.receivers[operation]
            return all((operation, receiver) in announced for receiver in receivers)
        return False

    def _heads(self, state: State) -> set[tuple[Operation, str]]:
        return {(kernels[0], device) for device, _, kernels in state.queues}

    def _complete(self, state: State) -> State:
        """End the kernels that run at every member that has not ended before."""
        heads = self._heads(state)
        for operation, device in heads:
            members = ((operation, member) for member in self.members[operation])
            if all(member in heads or member in state.done for member in members):
                return self._end(state, operation, device)
        return state

    def _early_ends(self, state: State) -> Iterator[tuple[Operation, str]]:
        """Broadcasts that run at the root and at this member."""
        heads = self._heads(state)
        for operation, device in heads:
            if operation[0] == "broadcast":
                root = (operation, operation[1])
                if root in heads or root in state.done:
                    yield operation, device

    def _end(self, state: State, operation: Operation, device: str) -> State:
        queues = set()
        for owner, queue, kernels in state.queues:
            if owner == device and kernels[0] == operation:
                kernels = kernels[1:]
            if kernels:
                queues.add((owner, queue, kernels))
        done = state.done | {(operation, device)}
        return dataclasses.replace(state, queues=frozenset(queues), done=done)

    def _launch(self, state: State, number: int, thread: Thread, action: Action) -> State:
        kernels: tuple[Operation, ...] = ()
        others = set()
        for owner, queue, queued in state.queues:
            if (owner, queue) == (thread.device, action.queue):
                kernels = queued
            else:
                others.add((owner, queue, queued))
        others.add((thread.device, action.queue, (*kernels, action.operation)))
        positions = list(state.positions)
        positions[number] += 1
        return self.settle(
            dataclasses.replace(state, positions=tuple(positions), queues=frozenset(others))
        )
