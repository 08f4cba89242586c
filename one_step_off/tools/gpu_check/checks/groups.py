"""Dedicated groups: speed between each pair of devices, a rank that never comes, and one that dies.

The members are processes, as in a run. They meet at a store of the check's own process.
"""

import itertools
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from one_step_off import distributed_util
from one_step_off.cluster.errors import SyncError
from one_step_off.distributed_util import (
    DedicatedGroup,
    connect_store,
    connect_timeout,
    open_store,
)
from one_step_off.tools.gpu_check.check import CheckFailed, Context, Figures
from one_step_off.tools.gpu_check.checks import weights
from one_step_off.tools.gpu_check.peers import HOST, Failed, all_results, run_peers
from one_step_off.weight_sync.bucket_plan import BucketPlan
from one_step_off.weight_sync.sender import WeightSender

MESSAGE_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
REPEATS = 3
CONNECT_S = 60.0
MAX_PAIRS = 28
"""All pairs of eight GPUs. Of more GPUs only neighbors are measured."""

WAIT_S = {"cpu": 5.0, "cuda": 15.0}
"""weight_sync.timeout_s of the checks in which a member never comes; NCCL starts slowly."""

GRACE_S = 15.0
"""Beyond the limit that a wait has: starting CUDA and noticing the end take time too."""


def _device(context_device: str, index: int) -> torch.device:
    if context_device == "cpu":
        return torch.device("cpu")
    index %= torch.cuda.device_count()  # ranks may share a GPU
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _groups(count: int) -> list[tuple[int, ...]]:
    """The groups to create, one after another: pairs, then all members at once."""
    pairs: list[tuple[int, ...]] = list(itertools.combinations(range(count), 2))
    if len(pairs) > MAX_PAIRS:
        pairs = list(itertools.pairwise(range(count)))
    return pairs if count == 2 else [*pairs, tuple(range(count))]


# ---- speed ---------------------------------------------------------------------------------------


def pairs(context: Context) -> Figures:
    """A dedicated group for each pair of devices: seconds to create, GB/s of a broadcast."""
    store = open_store(HOST, CONNECT_S)
    count = max(2, context.gpus)
    jobs = [(_pair_member, (context.device, index, count, store.port)) for index in range(count)]
    reports = all_results(
        run_peers(jobs, context.limit_s - GRACE_S), [f"member {index}" for index in range(count)]
    )
    figures: Figures = {}
    speeds = []
    for report in reports:
        for name, (created_s, speed) in report.items():
            figures[name] = f"{speed:.2f} GB/s, created in {created_s:.2f} s"
            speeds.append(speed)
    return {"slowest GB/s": min(speeds), "fastest GB/s": max(speeds)} | figures


def _pair_member(
    device_type: str, index: int, count: int, port: int
) -> dict[str, tuple[float, float]]:
    """One device's part in all groups. Returns, for the groups in which it is the first member,
    (seconds to create, GB/s)."""
    device = _device(device_type, index)
    store = connect_store(HOST, port, CONNECT_S)
    report = {}
    for members in _groups(count):
        if index not in members:
            continue
        name = "-".join(map(str, members))
        own_store = dist.PrefixStore(name, store.clone())
        rank = members.index(index)
        begin = time.perf_counter()
        group = DedicatedGroup(own_store, rank, len(members), device, HOST, CONNECT_S, CONNECT_S)
        created_s = time.perf_counter() - begin
        speed = _broadcast_speed(group, rank, device)
        group.close()
        if rank == 0:
            report[name] = (created_s, speed)
    return report


def _broadcast_speed(group: DedicatedGroup, rank: int, device: torch.device) -> float:
    """GB/s of the fastest of REPEATS broadcasts. Raises CheckFailed: other bytes arrived."""
    size = MESSAGE_BYTES[device.type]
    buffer = torch.zeros(size, dtype=torch.uint8, device=device)
    fastest = 0.0
    for repeat in range(REPEATS):
        expected = weights.noise_bytes(size, repeat, device)
        if rank == 0:
            buffer.copy_(expected)
        _synchronize(device)
        begin = time.perf_counter()
        if rank == 0:
            group.start_send(buffer)
            group.wait(CONNECT_S)
        else:
            group.start_receive(buffer)
            group.finish_receive(buffer)
        _synchronize(device)
        fastest = max(fastest, size / (time.perf_counter() - begin) / 1e9)
        if not torch.equal(buffer, expected):
            raise CheckFailed(f"{device}: other bytes arrived than were sent")
    return fastest


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- failures ------------------------------------------------------------------------------------


def missing_rank(context: Context) -> Figures:
    """A sender whose receiver never comes, and one whose receiver dies while the backend connects:
    `connect` must end in time and leave the process and its device usable, also for a new group."""
    limit_s = connect_timeout(WAIT_S[context.device], 1, 1)
    jobs: list[Any] = [(_lonely_sender, (context.device,))]
    lonely = run_peers(jobs, limit_s + GRACE_S + CONNECT_S)[0]
    figures = {"limit, s": limit_s} | _ended_in_time(lonely, limit_s, "never comes")
    # Two ranks of one NCCL group cannot share a GPU. The new group is then one over CUDA IPC.
    shares_device = context.is_cuda and context.gpus == 1
    store = open_store(HOST, CONNECT_S)
    common = (context.device, store.port)
    jobs = [(_abandoned_sender, (*common, shares_device)), (_vanishing_receiver, common)]
    jobs.append((_good_receiver, (*common, shares_device)))
    time_s = 2 * (limit_s + GRACE_S) + CONNECT_S
    abandoned, _, good = run_peers(jobs, time_s, one_may_die=True)
    figures |= _ended_in_time(abandoned, limit_s, "dies as the group connects")
    all_results([good], ["the receiver of the new group"])
    return figures | {"new group": "shared memory" if shares_device else "connects and transfers"}


def _ended_in_time(result: Any, limit_s: float, what: str) -> Figures:
    """Raises CheckFailed: `connect` did not end with a SyncError within its limit."""
    if isinstance(result, Failed):
        raise CheckFailed(f"a sender whose receiver {what}: {result.reason}")
    waited_s, message = result
    figures: Figures = {f"receiver {what}": f"freed after {waited_s:.1f} s: {message}"}
    if waited_s > limit_s + GRACE_S:
        raise CheckFailed(f"connect took {waited_s:.1f} s, its limit is {limit_s:.1f} s", figures)
    return figures


def _new_sender(device: torch.device) -> WeightSender:
    plan = BucketPlan.build(weights.pieces(weights.SMALL), weights.BUCKET_BYTES)
    return WeightSender(plan, 0, device, HOST, WAIT_S[device.type])


def _lonely_sender(device_type: str) -> tuple[float, str]:
    device = _device(device_type, 0)
    return _connect_in_vain(_new_sender(device), device)


def _connect_in_vain(sender: WeightSender, device: torch.device) -> tuple[float, str]:
    """Seconds until the SyncError of `connect`, and its text."""
    begin = time.perf_counter()
    try:
        sender.connect(1, 1)
    except SyncError as error:
        waited_s = time.perf_counter() - begin
        _use(device)
        return waited_s, str(error)
    raise CheckFailed("connect succeeded without a receiver")


def _abandoned_sender(device_type: str, port: int, shares_device: bool) -> tuple[float, str]:
    """Its first receiver dies while the backend connects. Its second epoch has a good one."""
    device = _device(device_type, 0)
    store = connect_store(HOST, port, CONNECT_S)
    sender = _new_sender(device)
    _use(device)
    store.set("address", f"{sender.address[1]}")
    store.wait(["vanishing", "good"])
    result = _connect_in_vain(sender, device)
    store.set("second epoch", "")
    sender.connect(2, 1, [0] if shares_device else [])
    sender.send(iter(weights.versions(weights.SMALL, 1, device)[0].values()), 0)
    store.wait(["received"])  # it maps this process's memory
    return result


def _vanishing_receiver(device_type: str, port: int) -> None:
    """Says that it is there, as every member does first, and dies where it would enter gloo or
    NCCL."""
    device = _device(device_type, 0)
    store = connect_store(HOST, port, CONNECT_S)
    wait_s = WAIT_S[device_type]
    receiver, address = weights.new_receiver(store, 0, device, weights.SMALL, wait_s)
    distributed_util._create_group = _die  # in this process alone
    store.set("vanishing", "")
    receiver.connect(1, [address], 1)


def _die(*_: Any) -> None:
    os._exit(9)


def _good_receiver(device_type: str, port: int, shares_device: bool) -> None:
    """The receiver of the second epoch. Raises CheckFailed: it gets other weights."""
    device = _device(device_type, 0 if shares_device else 1)
    store = connect_store(HOST, port, CONNECT_S)
    wait_s = WAIT_S[device_type]
    receiver, address = weights.new_receiver(store, 0, device, weights.SMALL, wait_s)
    _use(device)
    store.set("good", "")
    store.wait(["second epoch"])
    received: weights.Weights = {}
    receiver.connect(2, [address], 1, [[0]] if shares_device else ())
    try:
        receiver.receive(weights._keep_in(received), 0)
        weights._compare(received, weights.versions(weights.SMALL, 1, device)[0], 0)
    finally:
        store.set("received", "")


def dead_peer(context: Context) -> Figures:
    """A receiver dies between two buckets: the sender and the other receiver must be freed, by an
    error, and go on."""
    receivers = 1 if context.is_cuda and context.gpus <= 2 else 2
    store = open_store(HOST, CONNECT_S)
    jobs: list[Any] = [(_sender_of_the_dying, (context.device, store.port, receivers))]
    for index in range(receivers):
        jobs.append((_receiver_that_may_die, (context.device, store.port, index, receivers)))
    # Three waits in a row, as in `StreamPeer._result_from_wire`.
    limit_s = 3 * WAIT_S[context.device] + GRACE_S
    results = run_peers(jobs, CONNECT_S + limit_s, one_may_die=True)
    return _freed_in_time(results, limit_s)


def _freed_in_time(results: list[Any], limit_s: float) -> Figures:
    """Raises CheckFailed: one that did not die has no result, or was freed too late."""
    names = ["the sender", "the receiver that dies", "the other receiver"][: len(results)]
    figures: Figures = {}
    for name, result in zip(names, results, strict=True):
        if name == "the receiver that dies":
            continue
        if isinstance(result, Failed):
            raise CheckFailed(f"{name} was not freed: {result.reason}", figures)
        seconds, message = result
        figures[name] = f"freed after {seconds:.1f} s: {message}"
        if seconds > limit_s:
            raise CheckFailed(f"{name} was freed after {seconds:.1f} s only", figures)
    return figures


def _sender_of_the_dying(device_type: str, port: int, receivers: int) -> tuple[float, str]:
    device = _device(device_type, 0)
    store = connect_store(HOST, port, CONNECT_S)
    plan = BucketPlan.build(weights.pieces(weights.SMALL), weights.BUCKET_BYTES)
    sender = WeightSender(plan, 0, device, HOST, WAIT_S[device_type])
    store.set("address", f"{sender.address[1]}")
    _meet(store, device, "sender", receivers)
    sender.connect(1, receivers)
    tensors = weights.versions(weights.SMALL, 1, device)[0].values()
    return _freed(lambda: sender.send(iter(tensors), 0), device)


def _receiver_that_may_die(
    device_type: str, port: int, index: int, receivers: int
) -> tuple[float, str]:
    device = _device(device_type, index + 1)
    store = connect_store(HOST, port, CONNECT_S)
    wait_s = WAIT_S[device_type]
    receiver, address = weights.new_receiver(store, index, device, weights.SMALL, wait_s)
    _meet(store, device, f"receiver {index}", receivers)
    receiver.connect(1, [address], receivers)

    def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
        if index == 0:
            os._exit(9)

    return _freed(lambda: receiver.receive(load, 0), device)


def _meet(store: dist.Store, device: torch.device, name: str, receivers: int) -> None:
    """Wait until all members have started their device, which takes longer than a connection
    may."""
    _use(device)
    store.set(name, "")
    store.wait(["sender", *(f"receiver {index}" for index in range(receivers))])


def _freed(transfer: Any, device: torch.device) -> tuple[float, str]:
    """Seconds until the transfer's SyncError, and its text."""
    begin = time.perf_counter()
    try:
        transfer()
    except SyncError as error:
        seconds = time.perf_counter() - begin
        _use(device)
        return seconds, str(error)
    raise CheckFailed("the transfer ended without an error")


def _use(device: torch.device) -> None:
    """The device must still compute."""
    total = torch.ones(1024, device=device).sum().item()
    if total != 1024:
        raise CheckFailed(f"{device} computes wrongly after the failure: {total}")
