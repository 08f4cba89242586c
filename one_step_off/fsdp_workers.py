"""The FSDP2 training back end: one rank of a role that holds a model, on GPUs or CPUs.

    worker = FSDPWorker(cfg, "actor", rank, world_size, "cpu", total_steps=200)
    worker.rendezvous(*address)          # address = rank 0's free_address()
    worker.setup()
    for each step:
        worker.update(batch)             # v(N) -> v(N+1)
        for piece, tensor in zip(worker.weight_plan(), worker.weight_tensors()): ...

It is a plain class: the caller wraps it in an actor and sets environment and threads before.
All ranks are called together; each call runs the same collectives in the same order on every rank.
"""

from __future__ import annotations

import datetime
import os
import resource
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from one_step_off import batching, core_algos, fsdp_model, policy_losses
from one_step_off.config import Config, ConfigError
from one_step_off.samples import Batch, Sample, assert_versions
from one_step_off.usage import UsageProbe
from one_step_off.workers import WeightPiece


class FSDPWorker(UsageProbe):
    """Implements `workers.TrainWorker` for the roles "actor" (trained) and "ref" (frozen, log_prob only).

    `version` counts finished updates; a resumed run sets it. `optimizer_steps` is the position in the
    learning-rate schedule; a skipped step counts too, so the schedule keeps to the trainer's steps.
    """

    def __init__(
        self, cfg: Config, role: str, rank: int, world_size: int, device: str, total_steps: int | None = None
    ) -> None:
        """`total_steps`: trainer steps of the whole run, for the learning-rate schedule."""
        if role not in ("actor", "ref"):
            raise ValueError(f"role {role!r}: the fsdp back end fills actor and ref")
        self.cfg, self.role, self.rank, self.world_size = cfg, role, rank, world_size
        self._device_type, self._total_steps = device, total_steps or cfg.trainer.total_steps
        self._address: tuple[str, int] | None = None
        self.version = 0
        self.optimizer_steps = 0
        self.optimizer: torch.optim.Optimizer | None = None

    # ---- start --------------------------------------------------------------------------------------------------

    def free_address(self, host: str = "") -> tuple[str, int]:
        """Where the ranks are to meet, a free port included (ask rank 0). `host` empty: this machine's own address."""
        if not host:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect(("192.0.2.1", 9))  # sends nothing; asks the kernel which interface leads outside
                    host = probe.getsockname()[0]
                except OSError:
                    host = "127.0.0.1"
        with socket.socket() as s:
            s.bind((host, 0))
            return host, s.getsockname()[1]

    def rendezvous(self, master_addr: str, master_port: int) -> None:
        """Tell where rank 0 listens; before `setup`."""
        self._address = (master_addr, master_port)

    def setup(self) -> dict[str, Any]:
        """Join the process group, build, load and shard the model (collective).

        Raises:
            ConfigError: the model cannot be trained here; the message names the key.
        """
        if self._address is None:
            raise RuntimeError(f"{self.role} rank {self.rank}: rendezvous() comes before setup()")
        if self._device_type == "cuda":
            self.device = torch.device("cuda", self.rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self._device_type == "cuda" else "gloo",
            init_method=f"tcp://{self._address[0]}:{self._address[1]}",
            rank=self.rank,
            world_size=self.world_size,
            timeout=datetime.timedelta(seconds=self.cfg.trainer.step_timeout_s),
        )
        trainable = self.role == "actor"
        mesh = fsdp_model.make_mesh(self.device, self.world_size, self.cfg.actor.fsdp_size)
        self.model = fsdp_model.build(self.cfg, self.device, mesh, trainable)
        attention = fsdp_model.attention_for(self.cfg, self.device)
        # Packing needs variable-length attention. SDPA on a CPU is also 13 times slower packed than sorted and padded.
        self.packed = attention == "flash_attention_2"
        self._weights = fsdp_model.ShardedWeights(self.model, getattr(torch, self.cfg.model.dtype), self.device)
        if trainable:
            self._make_optimizer()
        count = sum(p.numel() for p in self.model.parameters())
        facts = {"num_params": count, "device": str(self.device), "world_size": self.world_size}
        return facts | {"attention": attention, "packed": self.packed}

    def _make_optimizer(self) -> None:
        actor = self.cfg.actor
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim <= 1]
        # Norms and biases do not decay, as is usual (and as Megatron has it).
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=actor.lr,
            betas=tuple(actor.betas),
            eps=actor.eps,
            weight_decay=actor.weight_decay,
            fused=True,
        )
        self._host_state: dict[torch.Tensor, torch.Tensor] = {}

    # ---- log-probs ----------------------------------------------------------------------------------------------

    def log_prob(self, batch: Batch) -> dict[int, np.ndarray]:
        """Log-probs of all response tokens of this rank's share: position in batch -> float32 [R] (collective)."""
        plan = batching.plan(
            [s.length for s in batch.samples], self.world_size, self.cfg.actor.micro_batch_tokens, self.packed
        )
        sequences = {i: _sequence(batch.samples[i]) for micro in plan[self.rank] for i in micro}
        wanted = {i: np.arange(len(batch.samples[i].prompt_ids), batch.samples[i].length) for i in sequences}
        return self._scores(sequences, wanted, plan[self.rank], self.cfg.rollout.temperature)

    def score(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        """Log-probs at temperature 1 of every token but the first (collective; the whole answer on every rank).

        Every rank scores everything: the canary's few sequences cost less than gathering would.
        """
        lengths = [len(s) for s in sequences]
        plan = batching.plan(lengths, 1, self.cfg.actor.micro_batch_tokens, self.packed)[0]
        wanted = {i: np.arange(1, n) for i, n in enumerate(lengths)}
        scores = self._scores(dict(enumerate(sequences)), wanted, plan, 1.0)
        return [scores[i] for i in range(len(sequences))]

    @torch.no_grad()
    def _scores(
        self, sequences: dict[int, np.ndarray], wanted: dict[int, np.ndarray], plan: list[list[int]], temperature: float
    ) -> dict[int, np.ndarray]:
        result: dict[int, np.ndarray] = {}
        for micro in plan:
            laid = batching.collate([sequences[i] for i in micro], [wanted[i] for i in micro], self.packed)
            log_probs = self._forward(laid, temperature, "none")[0].float().cpu().numpy()
            ends = np.cumsum(laid.counts)[:-1]
            result.update(zip(micro, np.split(log_probs, ends), strict=False))  # an empty one has no index
        self.model.reshard()  # without a backward pass the root's parameters would stay gathered, and grow stale
        return result

    def _forward(
        self, laid: batching.MicroBatch, temperature: float, entropy: str
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        position_ids = None if laid.position_ids is None else self._tensor(laid.position_ids)
        return self.model(
            input_ids=self._tensor(laid.input_ids),
            position_ids=position_ids,
            at=self._tensor(laid.at),
            tokens=self._tensor(laid.tokens),
            temperature=temperature,
            entropy=entropy,
            chunk=self.cfg.actor.log_prob_chunk,
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    # ---- update -------------------------------------------------------------------------------------------------

    def update(self, batch: Batch) -> dict[str, float]:
        """ppo_epochs passes over the batch in mini-batches of whole prompt groups (collective): v(N) -> v(N+1).

        Raises:
            StalenessError: before anything is changed, on every rank.
        """
        assert_versions(batch)
        self._check(batch)
        prompts = [s.prompt_id for s in batch.samples]
        minis = batching.mini_batches(prompts, self.cfg.actor.ppo_mini_batch_size) * self.cfg.actor.ppo_epochs
        stats, clock, rates = _Stats(self.device), _Clock(self.device), []
        for k, mini in enumerate(minis):
            self._accumulate(batch, mini, stats, clock, first=k == 0)
            with clock("optimizer"):
                rates.append(self._optimizer_step(stats))
        self.version += 1
        return self._metrics(stats, clock, len(minis), rates)

    def _check(self, batch: Batch) -> None:
        algorithm = self.cfg.algorithm
        for name, needed in (
            ("advantages", True),
            ("old_log_probs", algorithm.old_log_probs == "recompute"),
            ("ref_log_probs", algorithm.kl_coef > 0 and not algorithm.kl_in_reward),
        ):
            values = getattr(batch, name)
            if needed and (values is None or len(values) != len(batch.samples)):
                raise ValueError(f"step {batch.step}: the update needs {name} of all {len(batch.samples)} samples")

    def _accumulate(self, batch: Batch, mini: list[int], stats: _Stats, clock: _Clock, first: bool) -> None:
        """Forward and backward over this rank's micro-batches of one mini-batch."""
        samples = [batch.samples[i] for i in mini]
        trained = [int(s.loss_mask.sum()) for s in samples]
        # Every rank knows the whole mini-batch, so the denominators are global without a collective.
        weights = core_algos.token_weights(
            trained,
            self.cfg.algorithm.loss_agg,
            sum(trained),
            sum(n > 0 for n in trained),
            self.cfg.data.max_response_length,
        )
        plan = batching.plan(
            [s.length for s in samples], self.world_size, self.cfg.actor.micro_batch_tokens, self.packed
        )
        entropy = "grad" if self.cfg.algorithm.entropy_coef > 0 else "metric"
        for micro in plan[self.rank]:
            wanted = [len(samples[k].prompt_ids) + np.flatnonzero(samples[k].loss_mask) for k in micro]
            laid = batching.collate([_sequence(samples[k]) for k in micro], wanted, self.packed)
            per_token = self._per_token(batch, [mini[k] for k in micro], weights[micro] if micro else weights[:0])
            with clock("forward"):
                log_probs, entropies = self._forward(laid, self.cfg.rollout.temperature, entropy)
                loss = self._loss(log_probs, entropies, per_token, stats, first)
            with clock("backward"):
                # FSDP2 averages gradients over ranks; the sum is wanted. (gloo cannot scale while it reduces.)
                (loss * self.world_size).backward()
            stats.add("tokens_total", sum(samples[k].length for k in micro))

    def _per_token(self, batch: Batch, positions: list[int], weights: np.ndarray) -> dict[str, torch.Tensor]:
        """What the loss needs, of the trained tokens of some samples, one after the other: float32 [n] each.

        And "sequence", int64 [n]: which sequence each belongs to, of those with trained tokens.
        """
        masks = [batch.samples[i].loss_mask for i in positions]
        columns = {
            "mu": [batch.samples[i].log_probs for i in positions],
            "advantage": [batch.advantages[i] for i in positions],
            "weight": [np.full(len(m), w) for m, w in zip(masks, weights, strict=True)],
        }
        for name, values in (("proximal", batch.old_log_probs), ("ref", batch.ref_log_probs)):
            if values is not None:
                columns[name] = [values[i] for i in positions]
        empty = np.zeros(0)
        of = {
            name: self._tensor(
                np.concatenate([empty, *(x[m] for x, m in zip(arrays, masks, strict=True))]).astype(np.float32)
            )
            for name, arrays in columns.items()
        }
        counts = [n for n in (int(m.sum()) for m in masks) if n]
        return of | {"sequence": self._tensor(np.repeat(np.arange(len(counts)), counts).astype(np.int64))}

    def _loss(
        self,
        log_probs: torch.Tensor,
        entropies: torch.Tensor,
        of: dict[str, torch.Tensor],
        stats: _Stats,
        first: bool,
    ) -> torch.Tensor:
        """This micro-batch's part of the mini-batch's loss (a scalar); its statistics go into `stats`."""
        algorithm = self.cfg.algorithm
        low = algorithm.clip_ratio if algorithm.clip_ratio_low is None else algorithm.clip_ratio_low
        high = algorithm.clip_ratio if algorithm.clip_ratio_high is None else algorithm.clip_ratio_high
        decoupled = algorithm.old_log_probs == "recompute"
        old = of["proximal"] if decoupled else of["mu"]
        inputs = policy_losses.LossInputs(
            log_probs, old, of["advantage"], of["sequence"], of["weight"], low, high, algorithm.clip_ratio_c
        )
        policy_loss = policy_losses.POLICY_LOSSES.find(algorithm.policy_loss).function
        per_token, clipped = policy_loss(inputs, **algorithm.policy_loss_kwargs)
        if decoupled:
            per_token = per_token * policy_losses.correction_weights(
                old, of["mu"], of["sequence"], algorithm.rollout_correction, algorithm.rollout_correction_cap
            )
        policy = (of["weight"] * per_token).sum()
        loss = policy - algorithm.entropy_coef * (of["weight"] * entropies).sum()
        if "ref" in of and not algorithm.kl_in_reward:
            divergence = core_algos.kl(log_probs, of["ref"], algorithm.kl_estimator)
            loss = loss + algorithm.kl_coef * (of["weight"] * divergence).sum()
            stats.add("kl", divergence.detach().sum())
        stats.add("loss", loss.detach())
        stats.add("pg_loss", policy.detach())
        stats.add("entropy", entropies.detach().sum())
        stats.add("tokens", len(log_probs))
        sums, maxima = core_algos.token_stats(log_probs, of["mu"], clipped)
        difference, largest = sums.pop("logprob_diff"), maxima.pop("logprob_diff")
        if first:  # before any optimiser step of this update: policy lag and numerics, not training
            stats.add("logprob_diff", difference)
            stats.add("first_tokens", len(log_probs))
            stats.peak("logprob_diff", largest)
        for name, value in sums.items():
            stats.add(name, value)
        stats.peak("ratio", maxima["ratio"])
        return loss

    def _optimizer_step(self, stats: _Stats) -> float:
        """Clip by the true global norm and step; a norm that is not finite skips the step. Returns the rate."""
        actor, steps = self.cfg.actor, None
        if self._total_steps is not None:
            per_step = actor.ppo_epochs * -(-self.cfg.data.train_batch_size // actor.ppo_mini_batch_size)
            steps = self._total_steps * per_step
        rate = core_algos.learning_rate(
            self.optimizer_steps, steps, actor.lr, actor.lr_schedule, actor.warmup_steps, actor.min_lr_ratio
        )
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if torch.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(parameters, actor.grad_clip, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self._move_optimizer(to_host=False)
            self.optimizer.step()
            self._move_optimizer(to_host=True)
            stats.norms.append(float(norm))
        else:
            stats.skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer_steps += 1
        return rate

    def _move_optimizer(self, to_host: bool) -> None:
        """GPUs with optimizer_offload: the moments wait in pinned host memory, allocated once and reused."""
        if not (self.cfg.actor.optimizer_offload and self.device.type == "cuda" and not self.cfg.actor.param_offload):
            return
        for state in self.optimizer.state.values():
            for value in state.values():
                if not isinstance(value, DTensor):
                    continue
                # The DTensor stays the same object, so checkpoints find it; only what it points at moves.
                if to_host:
                    local = value._local_tensor
                    if value not in self._host_state:
                        self._host_state[value] = torch.empty_like(local, device="cpu", pin_memory=True)
                    value._local_tensor = self._host_state[value].copy_(local, non_blocking=True)
                elif value._local_tensor.device.type == "cpu":
                    value._local_tensor = value._local_tensor.to(self.device, non_blocking=True)
        if to_host:
            torch.cuda.synchronize()  # the copies must have ended before the device memory is used again

    def _metrics(self, stats: _Stats, clock: _Clock, minis: int, rates: list[float]) -> dict[str, float]:
        """Reduce over ranks: the same on every rank."""
        for phase, seconds in clock.totals().items():
            stats.peak(f"{phase}_s", seconds)
        sums, maxima = stats.reduce()
        tokens = max(sums["tokens"], 1.0)
        metrics = {
            "actor/loss": sums["loss"] / minis,
            "actor/pg_loss": sums["pg_loss"] / minis,
            "actor/entropy": sums["entropy"] / tokens,
            "actor/clip_frac": sums["clip"] / tokens,
            "actor/approx_kl": sums["approx_kl"] / tokens,
            "actor/grad_norm": float(np.mean(stats.norms)) if stats.norms else float("nan"),
            "actor/lr": rates[-1],
            "actor/skipped_updates": float(stats.skipped),
            "actor/tokens": sums["tokens"],
            "actor/tokens_total": sums["tokens_total"],
            "ratio/mean": sums["ratio"] / tokens,
            "ratio/max": maxima["ratio"],
            "logprob_diff/mean": sums["logprob_diff"] / max(sums["first_tokens"], 1.0),
            "logprob_diff/max": maxima["logprob_diff"],
        }
        if "kl" in sums:
            metrics["actor/kl"] = sums["kl"] / tokens
        return metrics | {f"actor/{name}": value for name, value in maxima.items() if name.endswith("_s")}

    # ---- weights ------------------------------------------------------------------------------------------------

    def weight_plan(self) -> list[WeightPiece]:
        """The rows this rank sends, in a fixed order (no collective). Empty on ranks that hold copies."""
        return self._weights.plan()

    def weight_tensors(self) -> Iterator[torch.Tensor]:
        """The data of `weight_plan()`, in its order and dtype (no collective). Read it before the next optimiser step."""
        return self._weights.tensors()

    def save_hf(self, path: str) -> None:
        """Write a Hugging Face checkpoint in model.dtype with tokenizer and generation config (collective).

        Rank 0 writes beside `path` and renames, so a checkpoint is there whole or not at all.
        """
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=options)
        problem: list[str | None] = [None]
        error: Exception | None = None
        if self.rank == 0:
            try:
                self._write(state, path)
            except Exception as e:  # a full disk, say; the other ranks must not wait for a rank that has left
                problem, error = [f"{type(e).__name__}: {e}"], e
        dist.broadcast_object_list(problem, src=0)
        if problem[0] is not None:
            raise RuntimeError(f"{self.role} rank 0 could not write {path}: {problem[0]}") from error

    def _write(self, state: dict[str, torch.Tensor], path: str) -> None:
        temporary, previous = f"{path}.tmp-{os.getpid()}", f"{path}.old-{os.getpid()}"
        fsdp_model.write_checkpoint(self.model, state, self.cfg, temporary)
        transformers.AutoTokenizer.from_pretrained(
            self.cfg.model.path, trust_remote_code=self.cfg.model.trust_remote_code
        ).save_pretrained(temporary)
        if os.path.exists(path):
            os.rename(path, previous)
        os.rename(temporary, path)
        shutil.rmtree(previous, ignore_errors=True)

    # ---- checkpoint ---------------------------------------------------------------------------------------------

    def save_state(self, folder: str) -> None:
        """Write weights, optimiser, counters and this rank's RNG state into `folder` (collective)."""
        state = {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }
        dcp.save(state, checkpoint_id=os.path.join(folder, "trainer"))
        own = {"version": self.version, "optimizer_steps": self.optimizer_steps, "rng": torch.get_rng_state()}
        if self._device_type == "cuda":
            own["cuda_rng"] = torch.cuda.get_rng_state()
        torch.save(own, os.path.join(folder, f"rank_{self.rank}.pt"))

    def load_state(self, folder: str) -> None:
        """Go to the state that `save_state` wrote, on this or another number of ranks (collective).

        Raises:
            ConfigError: the checkpoint is of another model or cannot be read.
        """
        state = {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }
        try:
            dcp.load(state, checkpoint_id=os.path.join(folder, "trainer"))
        except Exception as e:
            reason = (str(e).strip() or type(e).__name__).split("\n")[0]
            raise ConfigError(f"checkpoint {folder}: the trainer's part does not fit this model ({reason})") from e
        set_model_state_dict(self.model, state["model"], options=StateDictOptions(strict=False))  # tied: named once
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        mine = os.path.join(folder, f"rank_{self.rank}.pt")
        same_ranks = os.path.exists(mine)
        own = torch.load(mine if same_ranks else os.path.join(folder, "rank_0.pt"), weights_only=True)
        self.version, self.optimizer_steps = own["version"], own["optimizer_steps"]
        if same_ranks:
            torch.set_rng_state(own["rng"])
            if self._device_type == "cuda" and "cuda_rng" in own:
                torch.cuda.set_rng_state(own["cuda_rng"])

    # ---- the end ------------------------------------------------------------------------------------------------

    def peak_memory_bytes(self) -> int:
        """Most memory used so far: allocated on the GPU, or resident in this process."""
        if self._device_type == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def shutdown(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _sequence(sample: Sample) -> np.ndarray:
    return np.concatenate([sample.prompt_ids, sample.response_ids])


class _Stats:
    """Sums and maxima, kept on the device in float64 so that no micro-batch waits for the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, torch.Tensor] = {}
        self._maxima: dict[str, torch.Tensor] = {}
        self.norms: list[float] = []
        self.skipped = 0

    def add(self, name: str, value: torch.Tensor | float) -> None:
        value = torch.as_tensor(value, dtype=torch.float64, device=self._device)
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def peak(self, name: str, value: torch.Tensor | float) -> None:
        value = torch.as_tensor(value, dtype=torch.float64, device=self._device)
        self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def reduce(self) -> tuple[dict[str, float], dict[str, float]]:
        """Over all ranks: two small reductions, on the CPU (every rank has the same names in the same order)."""
        results = []
        for table, op in ((self._sums, dist.ReduceOp.SUM), (self._maxima, dist.ReduceOp.MAX)):
            packed = torch.stack(list(table.values())).cpu()
            dist.all_reduce(packed, op=op)
            results.append(dict(zip(table, packed.tolist(), strict=True)))
        return results[0], results[1]


class _Clock:
    """Seconds per phase. On GPUs by events: a host clock would time the launches, and waiting would cost speed."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any, Any]] = []

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = self._now()
        yield
        self._marks.append((phase, start, self._now()))

    def totals(self) -> dict[str, float]:
        if self._cuda:
            torch.cuda.synchronize()
        result: dict[str, float] = {}
        for phase, start, end in self._marks:
            seconds = start.elapsed_time(end) / 1000 if self._cuda else end - start
            result[phase] = result.get(phase, 0.0) + seconds
        return result
