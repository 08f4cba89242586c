"""One rank of a role with a model, whatever the back end: start, forward passes, figures of its
process.

    worker = PolicyWorker(cfg, "actor", rank, world_size, "cpu", total_steps=200)
    worker.setup(*address)               # the address is rank 0's free_address()
    for each step:
        worker.update(batch)             # v(N) -> v(N+1)
        for piece, tensor in zip(worker.weight_plan(), worker.weight_tensors()): ...

Workers are plain classes: the caller wraps them in actors and sets environment variables and
threads before. All ranks are called together, with the same arguments, and run the same collectives
in the same order. What each role offers is listed in `worker_interface.py`.
"""

import datetime
import itertools
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch import Tensor

from one_step_off.algorithms import batching
from one_step_off.algorithms.advantages import TokenArrays
from one_step_off.algorithms.shared_prefixes import Prefixes, prefixes_of
from one_step_off.cluster.network import reachable_host, select_gloo_interface
from one_step_off.cluster.placement import PlacedActor
from one_step_off.cluster.resource_usage import (
    UsageProbe,
    peak_resident_bytes,
    release_cached_memory,
)
from one_step_off.config.placement import processes_per_slot
from one_step_off.config.roles import role_settings
from one_step_off.config.schema import Config
from one_step_off.config.sections.roles import TrainedConfig
from one_step_off.data.images import Images
from one_step_off.data.packing import PackedShares, token_ids_of
from one_step_off.data.samples import Batch, Sample
from one_step_off.distributed_util import bind_rendezvous_to_its_host
from one_step_off.training import lora
from one_step_off.training.device_memory import in_device_turn, limit_memory
from one_step_off.training.token_outputs import Figure, TokenOutputs
from one_step_off.training.update_stats import PhaseTimer
from one_step_off.training.worker_interface import BatchShare


@dataclass
class WorkItem:
    """A micro-batch, what its loss needs of every wanted token (name -> tensor [n]), and the tokens
    of each of its sequences."""

    layout: batching.MicroBatch
    columns: dict[str, Tensor] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)


class ModelWorker(UsageProbe, PlacedActor, ABC):
    """One rank of a role with a model. A back end defines the abstract methods; a role adds what it
    is asked for.

    Attributes:
        cfg: the whole config; role_config: the section of this role.
        role, rank, world_size: this process is one rank of the role's process group.
        device: of the model; which of several GPUs is known after `setup`.
        batch_share: the part of a batch that this rank computes.
        packed: whether sequences are laid one after the other into one row, else padded to one row
            each.
        adapters: the LoRA adapters of the model; none in a back end without LoRA.
    """

    threads = {"control": 1}
    """Ray's concurrency groups. "control" answers `alive` while the worker's own thread is busy."""

    adapters = lora.Adapters(torch.nn.Module())
    packed: bool
    _checkpoint_group: dist.ProcessGroup
    """Of a role that learns, for its checkpoints alone: they are written while other groups are
    used."""

    def __init__(
        self, cfg: Config, role: str, rank: int, world_size: int, device: str, total_steps: int = 0
    ) -> None:
        """`total_steps`: trainer steps of the whole run, for the learning-rate schedule of roles
        that learn."""
        self.cfg = cfg
        self.role = role
        self.rank = rank
        self.world_size = world_size
        self.role_config = role_settings(cfg, role)
        self.total_steps = total_steps or cfg.trainer.total_steps
        self.batch_share = BatchShare(rank, world_size)
        self._device_type = device
        self.device = torch.device(device)

    @property
    def temperature(self) -> float:
        """What the logits are divided by in passes over batches."""
        return self.cfg.rollout.temperature

    @property
    def trained_figure(self) -> Figure:
        """The figure of each token that passes with gradients ask for."""
        return "none"

    # What a back end defines.

    @abstractmethod
    def _build_model(self) -> None:
        """Build, load and shard the model, after the process group has formed; set `packed` and,
        where it is not one share per rank, `batch_share` (collective)."""

    @abstractmethod
    def _build_optimizer(self) -> None:
        """Create the optimizer of a role that learns (collective)."""

    @abstractmethod
    def _run_micro_batches(
        self, items: Iterable[WorkItem], compute: Callable[[WorkItem], Tensor], timer: PhaseTimer
    ) -> None:
        """Call `compute`, which returns a scalar, on every item. Where gradients are enabled, also
        run its backward pass: gradients are summed over all items and ranks (collective)."""

    @abstractmethod
    def _forward(
        self, layout: batching.MicroBatch, temperature: float, figure: Figure
    ) -> TokenOutputs:
        """The model's output at the wanted tokens [n], and a figure of each, see
        `token_outputs.log_probs_and_entropy`."""

    def _warm_up(self) -> None:
        """Do what the first passes would be slow for, while the engines start (collective)."""

    # The start.

    def free_address(self, host: str = "") -> tuple[str, int]:
        """Where the ranks can meet, a free port included (ask rank 0). `host` empty: this node's
        own address."""
        with socket.create_server((reachable_host(host), 0)) as server:
            return server.getsockname()[:2]

    @in_device_turn
    def setup(self, master_addr: str, master_port: int) -> None:
        """Join the process group, which meets at rank 0's address; build, load and shard the model,
        with an optimizer for a role that learns (collective).

        Raises:
            ConfigError: the model cannot be trained here; the message names the key.
        """
        self._choose_device()
        select_gloo_interface(master_addr)
        bind_rendezvous_to_its_host()
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if self._device_type == "cuda" else "gloo",
            init_method=f"tcp://{master_addr}:{master_port}",
            timeout=datetime.timedelta(seconds=self.cfg.trainer.step_timeout_s),
            world_size=self.world_size,
            rank=self.rank,
        )
        self._build_model()
        if isinstance(self.role_config, TrainedConfig):
            self._build_optimizer()
            self._checkpoint_group = dist.new_group(backend="gloo")
        self._warm_up()
        self._end_turn()

    def _choose_device(self) -> None:
        if self._device_type == "cuda":
            self.device = torch.device("cuda", self.rank % torch.cuda.device_count())
        else:
            self.device = torch.device("cpu")
        torch.get_device_module(self.device).set_device(self.device)
        limit_memory(self.cfg, self.role, self.device)

    def share_of_batch(self) -> BatchShare:
        """Which part of a batch this rank computes; after `setup`."""
        return self.batch_share

    # Forward passes.

    def _response_outputs(self, batch: Batch, figure: Figure = "none") -> dict[int, np.ndarray]:
        """The model's output at all response tokens of this rank's share: position in batch ->
        float32 [R], or [R, 1 + m] with a figure of m numbers (collective)."""
        wanted = [np.arange(len(s.prompt_ids), s.length) for s in batch.samples]
        lengths = [s.length for s in batch.samples]
        rows = self._rows(batch, list(range(len(lengths))))
        plan = self._micro_batch_plan(lengths, self.batch_share.count, rows)
        micro_batches = plan[self.batch_share.index]
        sequences = [np.zeros(0, np.int32)] * len(batch.samples)
        experts: list[np.ndarray | None] = [None] * len(batch.samples)
        for position in itertools.chain(*micro_batches):
            sequences[position] = token_ids_of(batch.samples[position])
            experts[position] = self._experts_of(batch.samples[position])
        images = [batch.images.get(sample.prompt_id, ()) for sample in batch.samples]
        return PackedShares(
            self._token_outputs(
                sequences,
                wanted,
                micro_batches,
                self.temperature,
                figure,
                experts,
                images,
                rows=rows,
            )
        )

    def _rows(self, batch: Batch, positions: list[int]) -> Prefixes | None:
        """How samples at some positions, whole prompt groups, share prefixes on all ranks; None:
        they do not."""
        rule = self.batch_share.sharing
        if rule is None:
            return None
        samples = [batch.samples[position] for position in positions]
        prefixes = prefixes_of(samples) if batch.prefixes is None else batch.prefixes[positions]
        lengths = [sample.length for sample in samples]
        return batching.rows_that_pay(lengths, prefixes, rule, self.batch_share.count)

    def _experts_of(self, sample: Sample) -> np.ndarray | None:
        """The experts that the routers of this role take for a sample, in place of their own
        choice: the policy those of the engine."""
        replays = self.role == "actor" and self.cfg.rollout.replay_routing
        return sample.experts if replays else None

    def _micro_batch_plan(
        self, lengths: list[int], shares: int, rows: Prefixes | None = None
    ) -> batching.MicroBatchPlan:
        """plan[share][micro-batch] = indices of sequences; `lengths` in tokens; `rows`: see
        `batching.rows_that_pay`."""
        # Context- or sequence-parallel ranks share each sequence.
        role_config = self.role_config
        ranks = role_config.context_parallel_size * role_config.sequence_parallel_size
        token_budget = role_config.micro_batch_tokens * ranks
        padded = batching.padded_lengths(lengths, self.batch_share.width_multiple)
        rounds = self.batch_share.micro_batch_multiple
        return batching.plan_micro_batches(padded, shares, token_budget, self.packed, rounds, rows)

    @torch.no_grad()
    def _token_outputs(
        self,
        sequences: TokenArrays,
        wanted: TokenArrays,
        micro_batches: list[list[int]],
        temperature: float,
        figure: Figure = "none",
        experts: Sequence[np.ndarray | None] = (),
        images: Sequence[Images] = (),
        is_sampled: bool = True,
        rows: Prefixes | None = None,
    ) -> dict[int, np.ndarray]:
        """The model's output at the wanted tokens of some sequences (collective).

        Args:
            sequences: token ids, int [L] each.
            wanted: for each sequence the places, 1 .. L - 1, of the wanted tokens, int [n].
            micro_batches: indices into `sequences`.
            figure: of `token_outputs.log_probs_and_entropy`.
            experts: of each sequence, as `batching.collate` takes them; empty: the routers choose.
            images: of each sequence; (): none has any.
            is_sampled: see `batching.MicroBatch`.
            rows: of all sequences, see `batching.rows_that_pay`.

        Returns:
            Index of the sequence -> float32 [n], or [n, 1 + m] with a figure of m numbers. Empty
            where another rank reports the share.
        """
        items = []
        for indices in micro_batches:
            layout = self._lay_out(
                [sequences[i] for i in indices],
                [wanted[i] for i in indices],
                [experts[i] for i in indices] if experts else (),
                None if rows is None else rows[indices],
            )
            layout.images = [image for i in indices for image in images[i]] if images else []
            layout.is_sampled = is_sampled
            items.append(WorkItem(layout))
        outputs = []

        def keep_output(item: WorkItem) -> Tensor:
            output, figures = self._forward(item.layout, temperature, figure)
            if figures is not None:
                output = torch.column_stack([output, figures])
            outputs.append(output)
            return output.sum()

        self._run_micro_batches(items, keep_output, PhaseTimer(self.device))
        if not self.batch_share.reports or not items:
            self._end_turn()
            return {}
        # One copy to the host, at the end: it waits for the device.
        values = torch.cat(outputs).float().cpu().numpy()
        outputs.clear()
        self._end_turn()
        result = {}
        start = 0
        for indices, item in zip(micro_batches, items, strict=True):
            ends = start + np.cumsum(item.layout.counts)
            arrays = np.split(values[start : ends[-1]], ends[:-1] - start)
            # Not strict: an empty micro-batch has one stand-in sequence, and no index.
            result.update(zip(indices, arrays, strict=False))
            start = ends[-1]
        return result

    def _lay_out(
        self,
        sequences: TokenArrays,
        wanted: TokenArrays,
        experts: Sequence[np.ndarray | None] = (),
        rows: Prefixes | None = None,
    ) -> batching.MicroBatch:
        multiple = self.batch_share.width_multiple
        return batching.collate(sequences, wanted, self.packed, multiple, experts, rows)

    def _tensor(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            # Only from pinned memory does a copy run beside the host. torch reuses the pinned block
            # once the copy has ended.
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    # The process.

    def _end_turn(self) -> None:
        """Give the device the memory that torch only keeps for later, where other roles share the
        pool. A colocated engine could not wake up without it."""
        own_pool = self.cfg.placement.roles.get(self.role)
        if own_pool and processes_per_slot(self.cfg, own_pool) > 1:
            release_cached_memory(self.device)

    @ray.method(concurrency_group="control")
    def alive(self) -> None:
        """Answers, however busy the worker is: its process is there and runs."""

    def peak_memory_bytes(self) -> int:
        """Most memory used so far, in bytes: allocated on the GPU, or resident in this process."""
        if self._device_type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return peak_resident_bytes()

    def peak_memory_parts(self) -> dict[str, int]:
        """Most memory so far by kind, in bytes: "reserved" by torch on the GPU, used or kept for
        later; "resident" in host memory, where offloaded parameters and moments are."""
        parts = {"resident": peak_resident_bytes()}
        if self._device_type == "cuda":
            parts["reserved"] = torch.cuda.max_memory_reserved(self.device)
        return parts
