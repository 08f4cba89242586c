"""The FSDP2 training back end: one rank of a role that holds a model, on GPUs or CPUs.

    worker = PolicyWorker(cfg, "actor", rank, world_size, "cpu", total_steps=200)
    worker.setup(*address)               # rank 0's free_address()
    for each step:
        worker.update(batch)             # v(N) -> v(N+1)
        for piece, tensor in zip(worker.weight_plan(), worker.weight_tensors()): ...

`ModelWorker` holds a model, `TrainedWorker` also an optimiser; `PolicyWorker` fills actor and ref. They are plain
classes: the caller wraps them in actors and sets environment and threads before. All ranks are called together, with
the same arguments; each call runs the same collectives in the same order on every rank.
"""

import contextlib
import datetime
import functools
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import Tensor
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from one_step_off.algorithms import batching, core_algos, policy_losses, schedule
from one_step_off.algorithms.advantages import TokenArrays
from one_step_off.cluster.network import reachable_host, select_gloo_interface
from one_step_off.cluster.resource_usage import UsageProbe, peak_resident_bytes
from one_step_off.config.schema import (
    Config,
    ConfigError,
    TrainedConfig,
    first_line,
    load_section_tokenizer,
    role_settings,
)
from one_step_off.data.samples import Batch, PackedShares, Sample, assert_staleness
from one_step_off.models import safe_unpickling as safe_reading
from one_step_off.training import fsdp_model, lora
from one_step_off.training.update_stats import Clock, Stats
from one_step_off.weight_sync.bucket_plan import Pieces, pieces_by_tensor
from one_step_off.weight_sync.trainer_sender import WeightSenderMixin
from one_step_off.weight_sync.weight_piece import WeightPiece


class ModelWorker(UsageProbe):
    """One rank of a role with a model: start, forward passes, end."""

    threads = {
        "control": 1
    }  # beside the worker's own: what must be answered however busy that one is
    adapters = lora.Adapters(torch.nn.Module())  # a back end without LoRA has none
    _build_optimizer: Callable[[], None]  # of the roles that learn

    def __init__(
        self, cfg: Config, role: str, rank: int, world_size: int, device: str, total_steps: int = 0
    ) -> None:
        """`total_steps`: trainer steps of the whole run, for the learning-rate schedule of roles that learn."""
        self.cfg, self.role, self.rank, self.world_size = cfg, role, rank, world_size
        self.own = role_settings(cfg, role)
        self._device_type, self._total_steps = device, total_steps or cfg.trainer.total_steps
        # The part of a batch that is this rank's, of how many, and whether it tells what it finds of it; of what a
        # micro-batch's width and their number must be multiples.
        self.share, self.shares, self.tells, self.multiple, self.rounds = (
            rank,
            world_size,
            True,
            1,
            1,
        )

    def free_address(self, host: str = "") -> tuple[str, int]:
        """Where the ranks are to meet, a free port included (ask rank 0). `host` empty: this node's own address."""
        with socket.create_server((reachable_host(host), 0)) as s:
            return s.getsockname()[:2]

    def setup(self, master_addr: str, master_port: int) -> None:
        """Join the process group, which meets at rank 0's address; build, load and shard the model, with an optimiser
        for a role that learns (collective). Raises ConfigError: the model cannot be trained here; the message names the
        key."""
        cuda = self._device_type == "cuda"
        self.device = (
            torch.device("cuda", self.rank % torch.cuda.device_count())
            if cuda
            else torch.device("cpu")
        )
        torch.get_device_module(self.device).set_device(self.device)
        backend, limit = "cpu:gloo,cuda:nccl" if cuda else "gloo", self.cfg.trainer.step_timeout_s
        where, timeout = f"tcp://{master_addr}:{master_port}", datetime.timedelta(seconds=limit)
        select_gloo_interface(master_addr)
        dist.init_process_group(backend, where, timeout, self.world_size, self.rank)
        self._build()
        if isinstance(self.own, TrainedConfig):
            self._build_optimizer()

    def _build(self) -> None:
        """The model and what goes with it; the process group exists."""
        self.model = fsdp_model.build(self.cfg, self.device, self.role)
        self.adapters = lora.Adapters(self.model)
        # Packing needs variable-length attention. SDPA on a CPU is also 13 times slower packed than sorted and padded.
        self.packed = fsdp_model.attention_for(self.cfg, self.device) == "flash_attention_2"

    def _of_responses(self, batch: Batch, more: str = "none") -> dict[int, np.ndarray]:
        """The model's output at all response tokens of this rank's share: position in batch -> float32 [R] (collective)."""
        wanted = [np.arange(len(s.prompt_ids), s.length) for s in batch.samples]
        sequences = [_sequence(s) for s in batch.samples]
        return PackedShares(
            self._scores(sequences, wanted, self.cfg.rollout.temperature, more=more)
        )

    def _plan(self, lengths: list[int], ranks: int) -> batching.MicroBatchPlan:
        budget = (
            self.own.micro_batch_tokens * self.own.context_parallel_size
        )  # so many ranks share each sequence
        lengths = [-(-length // self.multiple) * self.multiple for length in lengths]
        return batching.plan_micro_batches(lengths, ranks, budget, self.packed, self.rounds)

    @torch.no_grad()
    def _scores(
        self,
        sequences: TokenArrays,
        wanted: TokenArrays,
        temperature: float,
        shared: bool = True,
        more: str = "none",
    ) -> dict[int, np.ndarray]:
        """The model's output at the wanted tokens, of this rank's share or of all: position -> float32 (collective).
        [R] each, or with `more`, a figure of `core_algos.log_probs_and_entropy`, [R, 2]. Empty where others tell it."""
        lengths, result, found = [len(s) for s in sequences], {}, []
        micros = (
            self._plan(lengths, self.shares)[self.share] if shared else self._plan(lengths, 1)[0]
        )
        work = [
            (self._lay([sequences[i] for i in micro], [wanted[i] for i in micro]),)
            for micro in micros
        ]

        def keep(laid: batching.MicroBatch) -> Tensor:
            answer, figure = self._forward(laid, temperature, more)
            found.append(answer if figure is None else torch.stack([answer, figure], -1))
            return found[-1].sum()

        self._run(work, keep, Clock(self.device))
        if self.tells:
            for micro, (laid,), answer in zip(micros, work, found, strict=True):
                answers = np.split(answer.float().cpu().numpy(), np.cumsum(laid.counts)[:-1])
                result.update(zip(micro, answers, strict=False))  # an empty one has no index
        return result

    def _lay(self, sequences: TokenArrays, wanted: TokenArrays) -> batching.MicroBatch:
        return batching.collate(sequences, wanted, self.packed, self.multiple)

    def _run(self, work: Iterable[tuple], result: Callable[..., Tensor], clock: Clock) -> None:
        """Take the `result`, a scalar, of each item, whose first part is its `MicroBatch`. Where gradients are on, derive
        it: they are summed over all items and ranks."""
        train = torch.is_grad_enabled()
        for item in work:
            with clock("forward"):
                value = result(*item)
            if train:
                with clock("backward"):
                    # FSDP2 averages gradients over ranks; the sum is wanted. (gloo cannot scale while it reduces.)
                    (value * self.world_size).backward()
        if not train:
            self.model.reshard()  # without a backward pass the root's parameters would stay gathered, and grow stale

    def _forward(
        self, laid: batching.MicroBatch, temperature: float, entropy: str
    ) -> core_algos.TokenOutputs:
        inputs = {
            name: x if x is None else self._tensor(x)
            for name, x in vars(laid).items()
            if name != "counts"
        }
        return self.model(
            **inputs, temperature=temperature, entropy=entropy, chunk=self.cfg.actor.log_prob_chunk
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    @ray.method(concurrency_group="control")
    def alive(self) -> None:
        """Answer, however busy the worker is: its process is there and runs."""

    def peak_memory_bytes(self) -> int:
        """Most memory used so far: allocated on the GPU, or resident in this process."""
        return (
            torch.cuda.max_memory_allocated()
            if self._device_type == "cuda"
            else peak_resident_bytes()
        )


class TrainedWorker(ModelWorker):
    """One rank of a role that learns. A subclass says which columns of the batch its loss needs, and what it is.
    `version` counts finished updates; a resumed run sets it. `optimizer_steps` is the position in the learning-rate
    schedule; a skipped step counts too."""

    threads = {"control": 1, "saving": 1}  # beside the worker's own
    version = 0
    optimizer_steps = 0
    skipped_in_a_row = 0
    optimizer: torch.optim.Optimizer | None = None

    @functools.cached_property
    def decay(self) -> schedule.Decay:
        """Of the learning rate; `load_state` changes it where the checkpoint's run had another plan."""
        return schedule.new_decay(self._decay_plan(), self.own.warmup_steps)

    def _decay_plan(self) -> schedule.DecayPlan:
        return schedule.decay_plan(self.cfg, self.role, self._total_steps or 0)

    def before_step(self) -> None:
        """Called before the weights change; whoever still reads them makes it wait."""

    def _loss_agg(self) -> str:
        """How the losses of the tokens are added up, see `core_algos.token_weights`."""
        return self.cfg.algorithm.loss_agg

    def _columns(self, batch: Batch) -> dict[str, list[np.ndarray]]:
        """What the loss needs of every response token, by its own names: one array [R] per sample."""

    def _micro_loss(
        self, laid: batching.MicroBatch, of: dict[str, Tensor], stats: Stats, first: bool
    ) -> Tensor:
        """This micro-batch's part of the mini-batch's loss, a scalar; its statistics go into `stats`. `of` holds what
        `_per_token` finds; `first`: no optimiser step of this update has been made yet."""

    def _own_metrics(
        self, sums: dict[str, float], maxima: dict[str, float], minis: int
    ) -> dict[str, float]:
        """Metrics beyond those of every trained role."""

    def _build_optimizer(self) -> None:
        own = self.own
        trained = [
            p for p in self.model.parameters() if p.requires_grad
        ]  # with LoRA the adapters alone
        # Norms and biases do not decay, as is usual (and as Megatron has it).
        groups = [{"params": [p for p in trained if p.ndim > 1]}]
        groups += [{"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        self.optimizer = torch.optim.AdamW(
            groups, own.lr, tuple(own.betas), own.eps, own.weight_decay, fused=True
        )
        # A group of its own: checkpoints are written while the others are at work.
        self._writers = dist.new_group(backend="gloo")

    def update(self, batch: Batch, learn: bool = True, profile: str = "") -> dict[str, float]:
        """ppo_epochs passes over the batch in mini-batches of whole prompt groups (collective): v(N) -> v(N+1). Without
        `learn` the step counts and nothing changes: the actor waits while the critic warms up. `profile`: a folder for
        torch's profile of this rank. Raises StalenessError: before anything is changed, on every rank."""
        if profile:
            os.makedirs(profile, exist_ok=True)
            path = f"{profile}/{self.role}_rank_{self.rank}.json.gz"
            with torch.profiler.profile(
                on_trace_ready=lambda found: found.export_chrome_trace(path)
            ):
                return self.update(batch, learn)
        assert_staleness(batch)
        if not learn:
            self.before_step()
            self.version += 1
            return {}
        for name, values in self._columns(batch).items():
            if values is None or len(values) != len(batch.samples):
                raise ValueError(
                    f"step {batch.step}: the update needs {name} of all {len(batch.samples)} samples"
                )
        prompts = [s.prompt_id for s in batch.samples]
        minis = (
            batching.split_into_mini_batches(prompts, self.own.ppo_mini_batch_size)
            * self.own.ppo_epochs
        )
        stats, clock, rates = Stats(self.device), Clock(self.device), []
        for k, mini in enumerate(minis):
            self._accumulate(batch, mini, stats, clock, first=k == 0)
            with clock("sync_wait"):
                self.before_step()
            with clock("optimizer"):
                rates.append(self._optimizer_step(stats))
        self.version += 1
        self.adapters.gather()  # sending calls no collective
        return self._metrics(stats, clock, len(minis), rates)

    def _accumulate(
        self, batch: Batch, mini: list[int], stats: Stats, clock: Clock, first: bool
    ) -> None:
        """Forward and backward over this rank's micro-batches of one mini-batch."""
        samples = [batch.samples[i] for i in mini]
        trained = [int(s.loss_mask.sum()) for s in samples]
        # Every rank knows the whole mini-batch, so the denominators are global without a collective.
        longest = self.cfg.data.max_response_length
        weights = core_algos.token_weights(
            trained, self._loss_agg(), sum(trained), sum(n > 0 for n in trained), longest
        )
        micros = self._plan([s.length for s in samples], self.shares)[self.share]

        def work() -> Iterator[tuple]:
            for micro in micros:
                wanted = [
                    len(samples[k].prompt_ids) + np.flatnonzero(samples[k].loss_mask) for k in micro
                ]
                laid = self._lay([_sequence(samples[k]) for k in micro], wanted)
                yield (
                    laid,
                    self._per_token(batch, [mini[k] for k in micro], weights[micro]),
                    stats,
                    first,
                )

        self._run(work(), self._micro_loss, clock)
        stats.add(tokens_total=sum(samples[k].length for micro in micros for k in micro))

    def _per_token(
        self, batch: Batch, positions: list[int], weights: np.ndarray
    ) -> dict[str, Tensor]:
        """The columns and "weight" (in the loss) of the trained tokens of some samples, in a row: float32 [n] each. And
        "sequence", int64 [n]: which sequence each belongs to, of those with trained tokens."""
        masks = [batch.samples[i].loss_mask for i in positions]
        columns = {
            name: [values[i] for i in positions] for name, values in self._columns(batch).items()
        }
        columns["weight"] = [np.full(len(m), w) for m, w in zip(masks, weights, strict=True)]
        trained = np.concatenate([np.zeros(0, bool), *masks])
        of = {
            name: np.concatenate([np.zeros(0), *x])[trained].astype(np.float32)
            for name, x in columns.items()
        }
        counts = [n for n in (int(m.sum()) for m in masks) if n]
        of["sequence"] = np.repeat(np.arange(len(counts)), counts).astype(np.int64)
        return {name: self._tensor(array) for name, array in of.items()}

    def _optimizer_step(self, stats: Stats) -> float:
        """Clip by the true global norm and step, or skip the step: all ranks alike, see `_may_step`. Returns the rate."""
        own, decay = self.own, self.decay
        how = own.lr, own.lr_schedule, own.warmup_steps, own.min_lr_ratio
        rate = core_algos.learning_rate(
            self.optimizer_steps, decay.total, *how, decay.begin, decay.done
        )
        dist.all_reduce(stats.broken)  # a loss exists on some ranks only, and all must do the same
        stats.norms.append(self._clip_and_step(rate, bool(stats.broken)))
        stats.broken.zero_()
        stats.skipped += self.skipped_in_a_row > 0
        self.optimizer_steps += 1
        return rate

    def _may_step(self, norm: float, broken: bool) -> bool:
        """Not with a loss that is not finite (`broken`), nor with such a norm or one above max_grad_norm_skip."""
        may = not broken and np.isfinite(norm) and norm <= (self.own.max_grad_norm_skip or np.inf)
        self.skipped_in_a_row = 0 if may else self.skipped_in_a_row + 1
        return may

    def _clip_and_step(self, rate: float, broken: bool = False) -> float:
        """One optimiser step, if `_may_step`. Returns the global norm of the gradients."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self._may_step(float(norm), broken):
            torch.nn.utils.clip_grads_with_norm_(parameters, self.own.grad_clip, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self._move_optimizer(self.device)
            self.optimizer.step()
            self._move_optimizer("cpu")
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def _move_optimizer(self, where: torch.device | str) -> None:
        """GPUs with optimizer_offload: the moments wait in pinned host memory, where torch puts what it copies to the host
        without blocking; its allocator reuses the blocks."""
        if not (
            self.own.optimizer_offload and self.device.type == "cuda" and not self.own.param_offload
        ):
            return
        for value in (
            v
            for state in self.optimizer.state.values()
            for v in state.values()
            if isinstance(v, DTensor)
        ):
            # The DTensor stays the same object, so checkpoints find it; only what it points at moves.
            value._local_tensor = value._local_tensor.to(where, non_blocking=True)
        torch.cuda.synchronize()  # the copies must have ended before what they were made of is used again

    def _metrics(
        self, stats: Stats, clock: Clock, minis: int, rates: list[float]
    ) -> dict[str, float]:
        """Reduce over ranks: the same on every rank."""
        stats.peak(**{f"{phase}_s": seconds for phase, seconds in clock.totals().items()})
        sums, maxima = stats.reduce(self.tells)
        norms = [norm for norm in stats.norms if np.isfinite(norm)]
        own = {name: value for name, value in maxima.items() if name.endswith("_s")}
        own |= {
            "loss": sums["loss"] / minis,
            "clip_frac": sums["clip"] / max(sums["tokens"], 1.0),
            "lr": rates[-1],
        }
        own |= {
            "skipped_updates": float(stats.skipped),
            "skipped_in_a_row": float(self.skipped_in_a_row),
        }
        own |= {"tokens": sums["tokens"], "tokens_total": sums["tokens_total"]}
        own["grad_norm"] = float(np.mean(norms)) if norms else float("nan")
        return {f"{self.role}/{name}": value for name, value in own.items()} | self._own_metrics(
            sums, maxima, minis
        )

    def _create_moments(self) -> None:
        """Give an optimiser that has made no step the state that its first step would begin with.

        torch's `get_state_dict` would make it by a step of rate 0, which AdamW counts: the bias correction of the first
        real step would then be that of a second one, and the step about 0.74 of its size.
        """
        if self.optimizer.state:
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                self.optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    def _state(self) -> dict[str, Any]:
        self._create_moments()
        model, optimizer = state_dict.get_state_dict(self.model, self.optimizer)
        # What is frozen comes from model.path again. (torch's own ignore_frozen_params would keep a tied head.)
        frozen = {
            name
            for name, p in self.model.named_parameters(remove_duplicate=False)
            if not p.requires_grad
        }
        return {
            "model": {name: model[name] for name in model if name not in frozen},
            "optimizer": optimizer,
        }

    def _write_state(self, folder: str) -> Any:
        """Copy the state to host memory and write it meanwhile; None: it is written already."""
        self._create_moments()
        self._move_optimizer("cpu")  # where new moments belong too, until the first step
        return dcp.async_save(self._state(), checkpoint_id=folder, process_group=self._writers)

    def _read_state(self, folder: str) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        lenient = state_dict.StateDictOptions(strict=False)  # tied tensors are named once
        both = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        state_dict.set_state_dict(self.model, self.optimizer, **both, options=lenient)

    def save_state(self, folder: str) -> None:
        """Copy weights, optimiser, counters and this rank's RNG state, to be written into `folder` (collective): training
        may go on while they are. `saved` waits for them, and must be called before the next one."""
        self._writing = self._write_state(os.path.join(folder, self.role))
        own = {
            "version": self.version,
            "optimizer_steps": self.optimizer_steps,
            "rng": torch.get_rng_state(),
        }
        own |= schedule.to_arrays(self.decay, self._decay_plan())
        if self._device_type == "cuda":
            own["cuda_rng"] = torch.cuda.get_rng_state()
        np.savez(os.path.join(folder, f"{self.role}_rank_{self.rank}.npz"), **own)

    @ray.method(concurrency_group="saving")
    def saved(self) -> None:
        """Wait until what `save_state` began is written. Raises RuntimeError: it cannot be."""
        try:
            if self._writing:
                self._writing.result()
        except (Exception, CheckpointException) as e:  # the latter, torch's own, is no Exception
            raise RuntimeError(f"it cannot be written: {_reason(e)}") from e

    def load_state(self, folder: str) -> None:
        """Go to the state that `save_state` wrote, on this or another number of ranks (collective); a rank that there
        was none of keeps the random numbers of a new run. Raises ConfigError: the checkpoint is of another model or
        cannot be read."""
        mine, first = (
            os.path.join(folder, f"{self.role}_rank_{rank}.npz") for rank in (self.rank, 0)
        )
        same_ranks = os.path.exists(mine)
        os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
        try:
            safe_reading.check(os.path.join(folder, self.role, ".metadata"))
            self._read_state(os.path.join(folder, self.role))
            with np.load(mine if same_ranks else first, allow_pickle=False) as file:
                own = dict(file)
        except (Exception, CheckpointException) as e:
            part = f"the part of the {self.role} does not fit its model ({_reason(e)})"
            raise ConfigError(f"checkpoint {folder}: {part}") from e
        finally:
            del os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"]
        self.adapters.gather()
        self.version, self.optimizer_steps = int(own["version"]), int(own["optimizer_steps"])
        self.decay = schedule.resumed_decay(
            self._decay_plan(), self.own.warmup_steps, schedule.from_arrays(own)
        )
        if same_ranks:
            torch.set_rng_state(torch.from_numpy(own["rng"]))
            if self._device_type == "cuda" and "cuda_rng" in own:
                torch.cuda.set_rng_state(torch.from_numpy(own["cuda_rng"]))


class PolicyWorker(TrainedWorker):
    """The roles "actor" (trained) and "ref" (frozen, `log_prob` only)."""

    def setup(self, master_addr: str, master_port: int) -> None:
        """As `ModelWorker.setup`; afterwards the weights can be streamed."""
        super().setup(master_addr, master_port)
        # Not later: while a pass runs the modules hold gathered parameters.
        self._weights = self._own_weights()

    def _own_weights(self) -> list[tuple[WeightPiece, Tensor]]:
        """What this rank sends: each piece, and the live tensor that has its data."""
        return fsdp_model.sharded_weights(self.model, self.cfg.model.dtype)

    def log_prob(self, batch: Batch) -> dict[int, np.ndarray]:
        """Log-probs of all response tokens of this rank's share: position in batch -> float32 [R] (collective)."""
        return self._of_responses(batch)

    def log_prob_and_squares(self, batch: Batch) -> dict[int, np.ndarray]:
        """As `log_prob`, float32 [R, 2]: beside each log-prob the sum of all the vocabulary's squared probabilities."""
        return self._of_responses(batch, "squares")

    def score(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        """Log-probs at temperature 1 of every token but the first (collective; the whole answer, or none of it). Every
        rank scores everything: the canary's few sequences cost less than gathering would."""
        scores = self._scores(
            sequences, [np.arange(1, len(s)) for s in sequences], 1.0, shared=False
        )
        return [scores[i] for i in sorted(scores)]

    def _columns(self, batch: Batch) -> dict[str, list[np.ndarray]]:
        columns = {"mu": [s.log_probs for s in batch.samples], "advantage": batch.advantages}
        if self.cfg.algorithm.old_log_probs == "recompute":
            columns["proximal"] = batch.old_log_probs
        if self.cfg.algorithm.kl_coef > 0 and not self.cfg.algorithm.kl_in_reward:
            columns["ref"] = batch.ref_log_probs
        return columns

    def _micro_loss(
        self, laid: batching.MicroBatch, of: dict[str, Tensor], stats: Stats, first: bool
    ) -> Tensor:
        a = self.cfg.algorithm
        entropy = "grad" if a.entropy_coef > 0 else "metric"
        log_probs, entropies = self._forward(laid, self.cfg.rollout.temperature, entropy)
        low, high = (
            a.clip_ratio if own is None else own for own in (a.clip_ratio_low, a.clip_ratio_high)
        )
        old = of.get("proximal", of["mu"])
        given = of["advantage"], of["sequence"], of["weight"]
        inputs = policy_losses.LossInputs(log_probs, old, *given, low, high, a.clip_ratio_c)
        per_token, clipped = policy_losses.POLICY_LOSSES.find(a.policy_loss).function(
            inputs, **a.policy_loss_kwargs
        )
        if "proximal" in of:  # decoupled PPO
            how = a.rollout_correction, a.rollout_correction_cap, a.rollout_correction_low
            per_token = per_token * policy_losses.correction_weights(
                old, of["mu"], of["sequence"], *how
            )
        policy = (of["weight"] * per_token).sum()
        loss = policy - a.entropy_coef * (of["weight"] * entropies).sum()
        if "ref" in of:
            divergence = core_algos.kl(log_probs, of["ref"], a.kl_estimator)
            loss = loss + a.kl_coef * (of["weight"] * divergence).sum()
            stats.add(kl=divergence.detach().sum())
        stats.add(
            loss=loss.detach(),
            pg_loss=policy.detach(),
            entropy=entropies.detach().sum(),
            tokens=len(log_probs),
        )
        sums, maxima = core_algos.token_stats(log_probs, of["mu"], clipped)
        difference, largest = sums.pop("logprob_diff"), maxima.pop("logprob_diff")
        if first:  # before any optimiser step of this update: policy lag and numerics, not training
            stats.add(logprob_diff=difference, first_tokens=len(log_probs))
            stats.peak(logprob_diff=largest)
        stats.add(**sums)
        stats.peak(**maxima)
        return loss

    def _own_metrics(
        self, sums: dict[str, float], maxima: dict[str, float], minis: int
    ) -> dict[str, float]:
        mean = {name: value / max(sums["tokens"], 1.0) for name, value in sums.items()}
        metrics = {
            f"actor/{name}": mean[name] for name in ("entropy", "approx_kl", "kl") if name in mean
        }
        metrics |= {
            "actor/pg_loss": sums["pg_loss"] / minis,
            "ratio/mean": mean["ratio"],
            "ratio/max": maxima["ratio"],
        }
        first = sums["logprob_diff"] / max(sums["first_tokens"], 1.0)
        return metrics | {"logprob_diff/mean": first, "logprob_diff/max": maxima["logprob_diff"]}

    def weight_plan(self) -> list[WeightPiece]:
        """The pieces this rank sends, in a fixed order (no collective). Empty on ranks that hold copies."""
        return [piece for piece, _ in self._weights]

    @torch.no_grad()
    def weight_tensors(self) -> Iterator[Tensor]:
        """The data of `weight_plan()`, in its order (no collective): the live rows themselves, in the dtype that they are
        trained in, or merged with an adapter. Read them before the next optimiser step."""
        for piece, tensor in self._weights:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            yield self.adapters.merged(piece.name, local).detach().reshape(piece.block_shape)

    @torch.no_grad()
    def gathered(self, pieces: Pieces, device: torch.device | str) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor on rank 0's `device`, one after the other, from all ranks' pieces; nothing on the other
        ranks, which must take part (collective)."""
        own = self.weight_tensors()
        if self.rank != 0:
            for piece, tensor in zip(pieces[self.rank], own, strict=True):
                dist.send(tensor.to(device, getattr(torch, piece.dtype)).contiguous(), 0)
            return
        for parts in pieces_by_tensor(pieces):  # which keeps the order of each rank's own
            shape, dtype = parts[0][1].shape, getattr(torch, parts[0][1].dtype)
            whole = torch.empty(shape, dtype=dtype, device=device)
            for rank, piece in parts:
                block = (
                    next(own)
                    if rank == 0
                    else torch.empty(piece.block_shape, dtype=dtype, device=device)
                )
                if rank != 0:
                    dist.recv(block, rank)
                piece.slice_of(whole).copy_(block)
            yield piece.name, whole

    def save_hf(self, path: str) -> None:
        """Write a Hugging Face checkpoint in model.dtype with tokenizer and generation config (collective). Rank 0
        writes beside `path` and renames, so a checkpoint is there whole or not at all."""
        plans: Pieces = [[] for _ in range(self.world_size)]
        dist.all_gather_object(plans, self.weight_plan())
        whole = dict(self.gathered(plans, "cpu"))
        adapter = self.adapters.state()
        if self.rank == 0:
            try:
                self._write(whole, adapter, path)
            except Exception as e:  # the disk may be full
                raise RuntimeError(
                    f"could not write {path}: {type(e).__name__}: {first_line(e)}"
                ) from e

    def _write(self, whole: dict[str, Tensor], adapter: dict[str, Tensor], path: str) -> None:
        temporary, cfg = f"{path}.unfinished", self.cfg
        shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
        plain = fsdp_model.empty(
            cfg, "actor", "sdpa", getattr(torch, cfg.model.dtype)
        )  # of the model's own class
        with contextlib.suppress(OSError):  # the model came without
            plain.generation_config = transformers.GenerationConfig.from_pretrained(cfg.model.path)
        plain.save_pretrained(
            temporary, state_dict=whole, save_original_format=False
        )  # which `whole` has already
        if adapter:
            lora.write(adapter, cfg.model, os.path.join(temporary, "adapter"))
        load_section_tokenizer(cfg, "model").save_pretrained(temporary)
        shutil.rmtree(path, ignore_errors=True)
        os.rename(temporary, path)


class CriticWorker(TrainedWorker):
    """The role "critic": a value for the state before each response token."""

    def values(self, batch: Batch) -> dict[int, np.ndarray]:
        """V(state before each response token), of this rank's share: position in batch -> float32 [R] (collective)."""
        return self._of_responses(batch)

    def _loss_agg(self) -> str:
        return self.own.loss_agg

    def _columns(self, batch: Batch) -> dict[str, list[np.ndarray]]:
        return {"value": batch.values, "return": batch.returns}

    def _micro_loss(
        self, laid: batching.MicroBatch, of: dict[str, Tensor], stats: Stats, first: bool
    ) -> Tensor:
        values = self._forward(laid, 1.0, "none")[0]
        per_token, clipped = core_algos.value_loss(
            values, of["value"], of["return"], self.own.clip_range_value
        )
        loss = (of["weight"] * per_token).sum()
        stats.add(loss=loss.detach(), tokens=len(values), clip=clipped.sum())
        error = of["return"].double() - of["value"]
        for name, value in (("value", of["value"]), ("return", of["return"]), ("error", error)):
            stats.add(**{name: value.double().sum(), f"{name}^2": value.double().square().sum()})
        return loss

    def _own_metrics(
        self, sums: dict[str, float], maxima: dict[str, float], minis: int
    ) -> dict[str, float]:
        mean = {name: value / max(sums["tokens"], 1.0) for name, value in sums.items()}
        spread, error = (
            max(mean[f"{name}^2"] - mean[name] ** 2, 0.0) for name in ("return", "error")
        )
        # 1: the old values foretold the returns; 0: no better than their mean.
        explained = 1 - error / spread if spread > 0 else float("nan")
        means = {f"critic/{name}_mean": mean[name] for name in ("value", "return")}
        return means | {"critic/explained_variance": explained}


class RewardModelWorker(ModelWorker):
    """The role "reward_model": one number per sequence, from its last token, as classifiers do."""

    def score_sequences(self, sequences: list[np.ndarray]) -> dict[int, float]:
        """Scores of this rank's share: position -> score (collective)."""
        # The output at the last token stands where a next token's would: one more is added, which no other one sees.
        longer = [np.append(s, 0) for s in sequences]
        found = self._scores(longer, [np.array([len(s)]) for s in sequences], 1.0)
        return {i: float(score[0]) for i, score in found.items()}


class ActorWorker(WeightSenderMixin, PolicyWorker):
    """The role "actor", whose ranks also send the weights."""


WORKERS = {
    "actor": ActorWorker,
    "ref": PolicyWorker,
    "critic": CriticWorker,
    "reward_model": RewardModelWorker,
}


def _reason(error: BaseException) -> str:
    """An error in one line; of those that torch's checkpoints gather from the ranks the first."""
    return first_line(
        next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    )


def _sequence(sample: Sample) -> np.ndarray:
    return np.concatenate([sample.prompt_ids, sample.response_ids])
