"""The arms of the weight-sync benchmark, as the driver sees them: `setup` once, then `run`
repeatedly.

All of them use the same trainer ranks and engines. Every update but the raw broadcast begins with
the engine's pause and ends when it may generate again.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.weight_sync import trainer, vllm_trainer
from benchmarks.weight_sync.layout import ARM_NAMES
from benchmarks.weight_sync.replica import slowest
from benchmarks.weight_sync.team import Team
from one_step_off.config.schema import WeightSyncConfig
from one_step_off.weight_sync.coordinator import WeightSync
from one_step_off.weight_sync.kind_choice import KindChoice
from one_step_off.weight_sync.report import GATHERING_PHASES, RECEIVER_PHASES

EXTRA_METRICS = ("bytes", "worker_bytes", "full_bytes", "raw_s", "wire_ratio", "in_place")


@dataclass
class Took:
    """What one run of an arm took.

    Attributes:
        seconds: until the engines may generate again.
        split: phase -> seconds of the slowest receiver. The phases follow one another.
        sender: phase -> seconds of rank 0 (of the product: of the slowest sender).
        extra: other figures; "wire": the product's seconds on the wire, in parallel to the phases.
    """

    seconds: float
    split: dict[str, float]
    sender: dict[str, float] = field(default_factory=dict)
    extra: dict[str, float] = field(default_factory=dict)


class Arm:
    """One way to bring the weights into the engines.

    Attributes:
        description: what it does, for the report.
        sign_changes: its first updates. Before each of them one in so many elements changes its
            sign.
        needs_own_model: it relies on what it left in the engine's model, so that no other arm may
            load that in between.
    """

    needs_own_model = False
    description = ""
    sign_changes: tuple[int, ...] = (2,)

    def __init__(self, name: str, team: Team) -> None:
        """`name`: in tables and flags."""
        self.name = name
        self.team = team

    @property
    def why_not(self) -> str:
        """Why it cannot run here; empty: it can."""
        return ""

    async def prepare(self) -> None:
        """What is done once and whose memory does not count."""

    async def setup(self) -> None:
        """What is done once and whose memory counts."""

    async def run(self, version: int) -> Took:
        """One whole update to the trainer's weights, which are `version`."""
        raise NotImplementedError

    async def leave(self) -> None:
        """Free all that it holds. It does not run again."""
        await self.team.forget_arm(self.name)


class Raw(Arm):
    """The yardstick: it loads nothing."""

    description = (
        "broadcast of as many bytes by rank 0, bucket after bucket, over touched buffers; "
        "nothing else"
    )

    async def run(self, version: int) -> Took:
        """One broadcast of every bucket."""
        begin = time.perf_counter()
        sent_s, _ = await asyncio.gather(
            self.team.run_on_rank_0(trainer.broadcast_raw),
            self.team.call_replicas("call_workers", "bench_receive_raw"),
        )
        with_calls_s = time.perf_counter() - begin
        return Took(sent_s, {"wire": sent_s}, extra={"with_calls": with_calls_s})


class PerTensor(Arm):
    """The common simple way."""

    description = (
        "rank 0 gathers and broadcasts one tensor after the other, the engine loads each; "
        "one call for all of it"
    )

    async def setup(self) -> None:
        """Ask for the names, dtypes and shapes."""
        self.tensors = await self.team.run_on_rank_0(trainer.metadata)

    async def run(self, version: int) -> Took:
        """Send and load every tensor."""
        sending = self.team.run_on_ranks(trainer.send_each_tensor)
        receiving = self.team.call_replicas("update_by", "bench_receive_each", self.tensors)
        return await self._together(sending, receiving)

    @staticmethod
    async def _together(
        sending: Awaitable[list[dict[str, float]]], receiving: Awaitable[list[dict[str, float]]]
    ) -> Took:
        begin = time.perf_counter()
        sent, received = await asyncio.gather(sending, receiving)
        return Took(time.perf_counter() - begin, slowest(received), sent[0])


class File(Arm):
    """Over a file system in memory."""

    description = (
        "rank 0 gathers all and writes safetensors into /dev/shm, "
        "the engine's own `reload_weights` reads them"
    )

    async def setup(self) -> None:
        """Create the folder."""
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm", prefix="weight_sync_")

    async def leave(self) -> None:
        """Remove the folder."""
        self.folder.cleanup()
        await super().leave()

    async def run(self, version: int) -> Took:
        """Write, then reload."""
        begin = time.perf_counter()
        written = await self.team.run_on_ranks(trainer.write_file, self.folder.name)
        reloaded = await self.team.call_replicas("update_by", "bench_reload", self.folder.name)
        return Took(time.perf_counter() - begin, written[0] | slowest(reloaded))


class VLLM(Arm):
    """vLLM's own weight transfer."""

    description = "vLLM's own NCCL engine and sender, packed as it packs (1 GiB at a time)"

    def __init__(self, name: str, team: Team) -> None:
        super().__init__(name, team)
        if team.device == "cpu":
            self.description += (
                "; gloo instead of NCCL, without CUDA's streams, the tied lm_head packed again"
            )

    async def prepare(self) -> None:
        """Import vLLM in the trainer."""
        await self.team.run_on_ranks(vllm_trainer.import_vllm)

    async def setup(self) -> None:
        """Create vLLM's trainer engine on every rank, and connect it to the replicas."""
        team = self.team
        await team.use_arm(self.name, {}, vllms=True)
        port = await team.run_on_rank_0(trainer.free_port, team.host)
        host = team.host
        if not host:
            addresses = await team.call_rank_methods("free_address")
            host = addresses[0][0]
        await team.run_on_ranks(vllm_trainer.open_vllm, host, port, team.receivers, team.replicas)

    async def run(self, version: int) -> Took:
        """One update, driven by vLLM's sender."""
        await self.team.use_arm(self.name, {})
        begin = time.perf_counter()
        sent = await self.team.run_on_ranks(vllm_trainer.send_vllm)
        seconds = time.perf_counter() - begin
        reports = await self.team.call_replicas("report")
        return Took(seconds, slowest(reports), sent[0])


class VLLMOnNCCL(Arm):
    """Reports in a CPU run that it did not run."""

    description = "vLLM's own engine as it is"
    why_not = "no GPUs here"


class Product(Arm):
    """The product's `WeightSync`.

    Attributes:
        keys: of weight_sync, which the arm sets.
        same_device: all receivers are taken to be on the senders' device.
    """

    keys: dict[str, Any] = {}
    same_device = False
    canary_scores: Any = None

    @property
    def why_not(self) -> str:
        """Why it cannot run here; empty: it can."""
        if self.same_device and self.team.cfg.rollout.tensor_parallel_size > 1:
            return "needs TP=1"
        known_keys = {key.name for key in dataclasses.fields(WeightSyncConfig)}
        missing = self.keys.keys() - known_keys
        if missing:
            return f"this version has no weight_sync.{min(missing)}"
        return ""

    async def prepare(self) -> None:
        """Score the canary once: the memory that the trainer needs for it is not the sync's."""
        self.canary_scores = asyncio.get_running_loop().create_future()
        self.canary_scores.set_result(await self.team.sync.score_canary())

    async def setup(self) -> None:
        """Connect a weight sync of its own, with the arm's keys."""
        team = self.team
        await team.use_arm(self.name, self.keys)
        actor = copy.copy(team.actor)
        actor.cfg = copy.deepcopy(team.cfg)
        trainer.set_weight_sync_keys(actor.cfg, self.keys)
        replicas = list(range(len(team.replicas))) if self.same_device else []
        replicas_on_device = [replicas for _ in team.ranks]
        self.sync = WeightSync(
            actor, team.rollout.supervisor, team.canary, team.host, replicas_on_device
        )
        await self.sync.connect()

    async def run(self, version: int) -> Took:
        """One sync of the product, with its canary."""
        await self.team.use_arm(self.name, self.keys)
        canary_scores = self.canary_scores
        self.canary_scores = None
        metrics = await self.sync((0, version), canary_scores)
        extra = {"wire": metrics["sync/wire_s"]}
        for name in EXTRA_METRICS:
            if f"sync/{name}" in metrics:
                extra[name] = metrics[f"sync/{name}"]
        return Took(
            metrics["sync/transfer_s"],
            {phase: metrics[f"sync/{phase}_s"] for phase in RECEIVER_PHASES},
            {phase: metrics[f"sync/{phase}_s"] for phase in GATHERING_PHASES},
            extra,
        )


class Sharded(Product):
    """The product's default."""

    description = (
        "every rank sends the rows that it owns, in buckets; a worker whose layout is proved gets "
        "what it keeps; checked by sums and names"
    )


class Whole(Sharded):
    """The product as if no worker had proved its layout."""

    description = "as sharded, but each worker gets whole tensors, which vLLM loads"

    async def run(self, version: int) -> Took:
        """One sync like the first one."""
        self.sync.layouts.forget_proofs(self.sync.groups.replicas)
        return await super().run(version)


class OnlyDeltas(KindChoice):
    """The choice of a link over which deltas are always faster."""

    def wants_full(self) -> bool:
        """Never."""
        return False


class Delta(Product):
    """The product sending what has changed."""

    description = "every rank sends the elements of its rows that changed; checked likewise"
    keys = {"mode": "delta"}
    needs_own_model = True
    sign_changes = (2, 8)  # the first one is sent in full anyway

    async def setup(self) -> None:
        """Connect, and measure deltas also where all weights would be faster."""
        await super().setup()
        self.sync.kind_choice = OnlyDeltas(self.sync.cfg.full_every)


class Shared(Product):
    """The product's transport for one device, here with one more processor than it would have."""

    description = (
        "as sharded, through memory that both sides map (on GPUs: CUDA IPC), without a network"
    )
    same_device = True


_CLASSES = (Raw, PerTensor, Whole, Sharded, Delta, Shared, File, VLLM, VLLMOnNCCL)
ARMS: dict[str, type[Arm]] = dict(zip(ARM_NAMES, _CLASSES, strict=True))
