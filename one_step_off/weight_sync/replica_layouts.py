"""The driver's record of what the workers of each replica keep of the model.

A new worker reports which blocks it keeps. Its first sync brings whole tensors and proves the
report. Later syncs bring only these blocks. After a failed sync no report of its replicas counts as
proved.

Where adapters alone are sent, a new worker keeps whole tensors, and proves instead that the base
model it has loaded is the trainer's.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from one_step_off.cluster.remote_calls import store_once
from one_step_off.weight_sync.base_weights import BaseModel
from one_step_off.weight_sync.bucket_plan import Pieces
from one_step_off.weight_sync.report import Report
from one_step_off.weight_sync.routes import ShardsOfReceivers
from one_step_off.weight_sync.shard_blocks import ShardBlocks, plain_shards, shards_from_plain
from one_step_off.weight_sync.sync_calls import Abort, begin_on_replicas, run_or_abort


class ReplicaLayouts:
    """The blocks that workers keep, by the actor handle of their replica.

    Attributes:
        shapes: name -> [dtype, shape] of each tensor that is sent.
        base: the frozen model, where adapters alone are sent; None: all weights are sent.
    """

    def __init__(self, pieces: Pieces, timeout_s: float) -> None:
        """`pieces`: of each sender. `timeout_s`: for a worker to tell what it keeps."""
        self.timeout_s = timeout_s
        self.base: BaseModel | None = None
        self.shapes: dict[str, list[Any]] = {}
        for sent in pieces:
            for piece in sent:
                self.shapes[piece.name] = [piece.dtype, list(piece.shape)]
        self._blocks: dict[Any, list[ShardBlocks] | None] = {}
        self._proved: set[Any] = set()

    async def learn(self, replicas: dict[int, Any], abort: Abort) -> None:
        """Ask those replicas that are new what their workers keep.

        Args:
            replicas: number -> actor handle.
            abort: ends the other calls when one fails.

        Raises:
            BrokenSync: one did not answer, or has loaded another base model.
        """
        new = {n: replica for n, replica in replicas.items() if replica not in self._blocks}
        if not new:
            return
        shapes = store_once(self.shapes)
        if self.base is None:
            what = "weight sync, layouts of the models"
            limit_s = self.timeout_s
            calls = begin_on_replicas(new, "learn_shards", shapes)
        else:
            what = "weight sync, base model"
            limit_s = self.base.read_limit_s(self.timeout_s)
            calls = begin_on_replicas(new, "prove_base", shapes, store_once(self.base.blocks))
        answers = await run_or_abort(what, calls, limit_s, limit_s, abort)
        for replica, workers in zip(new.values(), answers, strict=True):
            self._note_kept(replica, workers)

    def _note_kept(self, replica: Any, answers: list[dict[str, Any]]) -> None:
        """Take what each worker of a replica answered."""
        self._proved.discard(replica)
        self._blocks[replica] = None
        if all(answer["kept"] is not None for answer in answers):
            self._blocks[replica] = [shards_from_plain(answer["kept"]) for answer in answers]

    def kept_by(self, replicas: Sequence[Any]) -> ShardsOfReceivers | None:
        """What the receivers keep: the workers of these replicas, one after another. None: some
        cannot tell."""
        blocks_of_receiver: list[ShardBlocks] = []
        for blocks in [self._blocks[replica] for replica in replicas]:
            if blocks is None:
                return None
            blocks_of_receiver += blocks
        return ShardsOfReceivers.by_kind(blocks_of_receiver)

    def forget_all_but(self, replicas: Sequence[Any]) -> None:
        """All other processes are gone."""
        self._blocks = {r: blocks for r, blocks in self._blocks.items() if r in replicas}
        self._proved &= set(replicas)

    def all_keep_all(self, kept: ShardsOfReceivers) -> bool:
        """Whether every receiver keeps everything that is sent."""
        return kept.keeps_all({name: tuple(shape) for name, (_, shape) in self.shapes.items()})

    def are_proved(self, replicas: Sequence[Any]) -> bool:
        """Whether each of these replicas has shown that it keeps what it said."""
        return set(replicas) <= self._proved

    def note_reports(self, reports: dict[Any, list[Report]]) -> None:
        """Take what the workers report of a sync: replica -> its workers' reports."""
        for replica, workers in reports.items():
            self._proved.discard(replica)
            if all(worker.get("layout_proved") for worker in workers):
                self._proved.add(replica)

    def forget_proofs(self, replicas: Iterable[Any]) -> None:
        """A sync of these replicas failed: what it left in their models is unknown. The others keep
        their groups, which may send only blocks, and so need their proofs."""
        self._proved.difference_update(replicas)


def plain_shards_of_receivers(kept: ShardsOfReceivers | None) -> dict[str, Any] | None:
    """As plain data, for vLLM's workers."""
    if kept is None:
        return None
    return {
        "blocks": [plain_shards(blocks) for blocks in kept.blocks],
        "kind_of_receiver": list(kept.kind_of_receiver),
    }
