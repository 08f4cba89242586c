"""The engine: new weights in place, sleep and wake, and how far it is from the trainer.

The engine is the run's own `RolloutReplica`, in this process; this process also sends, from the
same device. What the engine must score is what a Hugging Face model with the same weights scores.
"""

import asyncio
import os
import threading
import time
from collections.abc import Coroutine
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch

from one_step_off.config.lengths import engine_length
from one_step_off.config.roles import load_hf_config, load_section_tokenizer
from one_step_off.config.schema import Config
from one_step_off.engines.engine import GenerationRequest
from one_step_off.tools.gpu_check.check import CheckFailed, Context, Figures
from one_step_off.tools.gpu_check.checkpoints import dtype_of, random_checkpoint
from one_step_off.tools.gpu_check.peers import HOST, all_results, policy_worker, run_peers, set_up
from one_step_off.weight_sync.bucket_plan import BucketPlan
from one_step_off.weight_sync.canary import Canary
from one_step_off.weight_sync.replica_layouts import plain_shards_of_receivers
from one_step_off.weight_sync.routes import ShardsOfReceivers
from one_step_off.weight_sync.sender import WeightSender
from one_step_off.weight_sync.shard_blocks import shards_from_plain
from one_step_off.weight_sync.weight_piece import WeightPiece

SEQUENCES = 4
TOKENS = 48
NEW_TOKENS = 24
"""Generated one by one: on GPUs by CUDA graphs, unlike the scores of whole sequences."""

NOISE = 0.5
"""Of the changed weights, as a share of each tensor's standard deviation: plainly another model."""

FRESH_LIMITS = {"float32": (1e-3, 1e-4), "bfloat16": (0.1, 0.006)}
"""By dtype: largest and mean difference in nats from an engine that was started with the changed
weights. Both use the same kernels, so this is far less than engine and HF may differ: one layer's
stale norm weights alone move the mean by 0.011."""

PLAIN_CHANGE = 0.1
"""Nats by which the changed weights must at least move a log-prob; else the check shows nothing."""

NOISE_FACTOR = 4.0
"""By so much more than it differs from itself may an engine differ after the way back."""

UPDATE_SHARE = 0.6
"""Of the time limit, for the engine that is updated; the fresh one has the rest."""

TIMEOUT_S = 60.0
BUCKET_BYTES = 64 << 20
FULL_EVERY = 100
GPU_SHARE = 0.3

Scores = list[np.ndarray]
"""float32 [tokens] of each sequence, in nats."""


def _config(context: Context, dtype: str, mode: str = "full", sleeps: bool = False) -> Config:
    """The config of a run on one device."""
    cfg = Config()
    cfg.model.path = random_checkpoint(context, dtype=dtype)
    cfg.model.dtype = dtype
    cfg.data.max_prompt_length = 2 * TOKENS
    cfg.data.max_response_length = 2 * NEW_TOKENS
    cfg.placement.device = context.device
    pool = "all" if sleeps else "rollout"
    cfg.placement.pools = {"all": [1]} if sleeps else {"rollout": [1], "actor": [1]}
    cfg.placement.roles = {"rollout": pool, "actor": "all" if sleeps else "actor"}
    cfg.rollout.kv_cache_mb = 64
    cfg.rollout.sampling_kwargs = {"ignore_eos": True}  # every answer has NEW_TOKENS
    cfg.rollout.gpu_memory_utilization = GPU_SHARE
    cfg.weight_sync.mode = mode
    cfg.trainer.step_timeout_s = TIMEOUT_S
    return cfg


def _sequences(cfg: Config) -> list[np.ndarray]:
    """Random token ids, int32 [TOKENS] each."""
    # Tokens that the tokenizer has: the embedding may have more rows.
    known = len(load_section_tokenizer(cfg, "model"))
    words = min(known, load_hf_config(cfg, cfg.model.path).vocab_size)
    rng = np.random.default_rng(0)
    return [rng.integers(0, words, TOKENS).astype(np.int32) for _ in range(SEQUENCES)]


@dataclass
class _Model:
    """A Hugging Face model whose weights are the reference, on the check's device."""

    model: Any

    @classmethod
    def load(cls, cfg: Config, device: str) -> "_Model":
        """The checkpoint of a config."""
        from transformers import AutoModelForCausalLM

        from one_step_off.models.rope import fix_frequencies

        dtype = getattr(torch, cfg.model.dtype)
        model = AutoModelForCausalLM.from_pretrained(
            cfg.model.path, dtype=dtype, trust_remote_code=cfg.model.trust_remote_code
        )
        fix_frequencies(model, engine_length(cfg))
        return cls(model.eval().to(device))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name -> parameter; tied ones once."""
        return {name: tensor.detach() for name, tensor in self.model.named_parameters()}

    @torch.no_grad()
    def add_noise(self, sign: int) -> None:
        """Change every weight by reproducible noise; -1 does not undo +1 exactly."""
        generator = torch.Generator().manual_seed(1)
        for tensor in self.tensors().values():
            noise = torch.randn(tensor.shape, generator=generator).to(tensor)
            spread = max(float(tensor.float().std(correction=0)), 0.01)
            tensor += sign * NOISE * spread * noise

    @torch.no_grad()
    def score(self, sequences: list[np.ndarray]) -> Scores:
        """Log-probs of every token but the first."""
        scores = []
        for ids in sequences:
            tokens = torch.from_numpy(ids).long().to(self.model.device)
            logits = self.model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
            log_probs = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            scores.append(log_probs.cpu().numpy())
        return scores


class ReplicaWithSender:
    """A replica and the sender that feeds it, driven from outside of an event loop."""

    def __init__(self, cfg: Config, device: str, weights: dict[str, torch.Tensor]) -> None:
        from one_step_off.rollout.replica import RolloutReplica
        from one_step_off.runtime.process_env import COMMON_ENV, ENGINE_ENV

        os.environ.update(COMMON_ENV | ENGINE_ENV[device])
        self.loop = asyncio.new_event_loop()
        self.cfg = cfg
        self.weights = weights
        self.layout_is_proved = False
        self.replica = RolloutReplica(cfg, 0, device, [])
        begin = time.perf_counter()
        self._run(self.replica.start())
        self._run(self.replica.engine.resume((0, 0)))  # of the checkpoint that it has loaded
        self.start_s = time.perf_counter() - begin
        self._connect(torch.device(device, 0) if device == "cuda" else torch.device("cpu"))

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    def _connect(self, device: torch.device) -> None:
        sent = []
        for name, tensor in self.weights.items():
            rows = tensor.shape[0] if tensor.ndim else 1
            dtype = str(tensor.dtype).removeprefix("torch.")
            sent.append(WeightPiece(name, dtype, tuple(tensor.shape), 0, rows))
        plan = BucketPlan.build([sent], BUCKET_BYTES)
        self.sender = WeightSender(plan, 0, device, HOST, TIMEOUT_S)
        if self.cfg.weight_sync.mode == "delta":
            self.sender.full_every = FULL_EVERY
        kept = self._learn_kept(sent)
        info = {
            "bucket_bytes": BUCKET_BYTES,
            "addresses": [self.sender.address],
            "host": HOST,
            "timeout_s": TIMEOUT_S,
            "pieces": [[astuple(piece) for piece in sent]],
            "epoch": 1,
            "receivers": 1,
            "same_device": [[0]],
            "kept": plain_shards_of_receivers(kept),
        }
        self._beside(
            lambda: self.sender.connect(1, 1, [0], kept), self.replica.connect_sync(info, 0)
        )

    def _learn_kept(self, sent: list[WeightPiece]) -> ShardsOfReceivers | None:
        """Ask the engine what it keeps of the model."""
        shapes = {piece.name: [piece.dtype, list(piece.shape)] for piece in sent}
        (answer,) = self._run(self.replica.learn_shards(shapes))
        if answer["kept"] is None:
            return None
        return ShardsOfReceivers.by_kind([shards_from_plain(answer["kept"])])

    def sync(self, version: int) -> dict[str, Any]:
        """Bring the engine to the weights that `weights` have now; returns the receiver's
        report."""
        tensors = iter(list(self.weights.values()))
        sharded_only = self.layout_is_proved
        sending = lambda: self.sender.send(tensors, version, sharded_only)  # noqa: E731
        (report,) = self._beside(sending, self.replica.sync((0, version), sharded_only))
        self.layout_is_proved = bool(report.get("layout_proved"))
        return report

    def _beside(self, sending: Any, receiving: Coroutine[Any, Any, Any]) -> Any:
        """Run `sending` on a thread and `receiving` here. The failure of either is raised."""
        failures: list[BaseException] = []

        def send() -> None:
            try:
                sending()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        try:
            result = self._run(receiving)
        finally:
            thread.join(3 * TIMEOUT_S)
        if failures:
            raise failures[0]
        return result

    def score(self, sequences: list[np.ndarray]) -> Scores:
        """The engine's half of the canary. One sequence at a time, so that batches are the same
        each time."""
        return [self._run(self.replica.score([ids]))[0] for ids in sequences]

    def generate(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        """The greedy continuation of each sequence, alone, so that batches are the same each
        time: float64 [2, NEW_TOKENS], the tokens and their log-probs."""
        return [self._run(self._generate_one(ids)) for ids in sequences]

    async def _generate_one(self, ids: np.ndarray) -> np.ndarray:
        request = GenerationRequest(ids, NEW_TOKENS, temperature=0.0)
        generated = await self.replica.engine.generate(request)
        return np.array([generated.ids, generated.log_probs], np.float64)

    def sleep(self) -> None:
        """Give the engine's memory back."""
        self._run(self.replica.sleep())


# ---- comparisons ---------------------------------------------------------------------------------


def _differences(first: Scores, second: Scores) -> tuple[float, float]:
    """Largest and mean difference."""
    apart = np.abs(np.concatenate(first) - np.concatenate(second))
    return float(apart.max()), float(apart.mean())


def _require_close(first: Scores, second: Scores, dtype: str, what: str) -> str:
    """The differences as text. Raises CheckFailed: they are beyond what a first sync may have."""
    largest, mean = _differences(first, second)
    limit = Canary(None, dtype).tolerance
    if not (largest <= limit.largest and mean <= limit.mean):
        raise CheckFailed(
            f"{what}: log-probs differ by {largest:.3g} nats (mean {mean:.3g}); "
            f"allowed are {limit.largest:g} and {limit.mean:g}"
        )
    return f"{largest:.2e} nats, mean {mean:.2e}"


class _Loaded:
    """What the engine answers with the weights that it loaded, twice: kernels may not repeat bit by
    bit."""

    def __init__(self, engine: ReplicaWithSender, sequences: list[np.ndarray]) -> None:
        self.tested = engine
        self.sequences = sequences
        self.scores = engine.score(sequences)
        self.tokens = engine.generate(sequences)
        self.noise, _ = _differences(self.scores, engine.score(sequences))
        again = engine.generate(sequences)
        self.repeats = self.noise == 0 and _are_same(self.tokens, again)

    def compare(self, what: str) -> str:
        """The engine must answer as then. Raises CheckFailed."""
        scores = self.tested.score(self.sequences)
        tokens = self.tested.generate(self.sequences)
        apart, _ = _differences(self.scores, scores)
        if self.repeats:
            if apart or not _are_same(self.tokens, tokens):
                raise CheckFailed(f"{what}: scores differ by up to {apart:.3g}, or tokens do")
            return "bit by bit as loaded"
        if apart > NOISE_FACTOR * self.noise:
            raise CheckFailed(f"{what}: scores differ by {apart:.3g}, repeated by {self.noise:.3g}")
        return f"as loaded to {apart:.2e} nats; the engine repeats itself to {self.noise:.2e}"


def _are_same(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


def _require_graphs_right(
    engine: ReplicaWithSender, sequences: list[np.ndarray], dtype: str
) -> str:
    """Tokens generated one by one (CUDA graphs) have the log-probs that the engine gives to the
    whole sequence (no decode graph). Graphs that still read old weights would not."""
    generated = engine.generate(sequences)
    whole = []
    one_by_one = []
    for ids, (tokens, log_probs) in zip(sequences, generated, strict=True):
        whole.append(np.concatenate([ids, tokens.astype(np.int32)]))
        one_by_one.append(log_probs.astype(np.float32))
    scores = [scored[TOKENS - 1 :] for scored in engine.score(whole)]
    return _require_close(one_by_one, scores, dtype, "generated one by one against scored at once")


# ---- the checks ----------------------------------------------------------------------------------


def in_place(context: Context) -> Figures:
    """Syncs of weights A, of others (as a delta, on GPUs in place), and of A again. What the engine
    scores with the others is what an engine scores that was started with them."""
    changed = str(context.folder / "changed")
    figures, updated = all_results(
        run_peers([(_updated, (context, changed))], context.limit_s * UPDATE_SHARE), ["the engine"]
    )[0]
    cfg = _config(context, dtype_of(context))
    job = (_engine_scores, (cfg, context.device, _sequences(cfg), changed))
    fresh = all_results(run_peers([job], context.limit_s / 3), ["a fresh engine"])[0]
    figures["updated, to a fresh engine"] = _require_same_weights(updated, fresh, cfg.model.dtype)
    return figures


def _require_in_place(report: dict[str, Any], device: str) -> str:
    """How the engine took the delta. Raises CheckFailed: not in place, on a GPU."""
    is_in_place = bool(report.get("in_place"))
    if device == "cuda" and not is_in_place:
        raise CheckFailed("the delta was not written in place: the engine loaded all weights again")
    return "in place" if is_in_place else "by reload"


def _require_same_weights(updated: Scores, fresh: Scores, dtype: str) -> str:
    """The differences as text. Raises CheckFailed: they are more than repeated starts explain."""
    largest, mean = _differences(updated, fresh)
    most, most_mean = FRESH_LIMITS[dtype]
    if not (largest <= most and mean <= most_mean):
        raise CheckFailed(
            f"the updated engine has other weights than a fresh one: log-probs differ by "
            f"{largest:.3g} nats (mean {mean:.3g}); allowed are {most:g} and {most_mean:g}"
        )
    return f"{largest:.2e} nats, mean {mean:.2e}"


def _save(model: _Model, cfg: Config, folder: str) -> None:
    """Save the model's weights, with the tokenizer of the config's checkpoint."""
    model.model.save_pretrained(folder)
    load_section_tokenizer(cfg, "model").save_pretrained(folder)


def _require_moved(first: Scores, second: Scores) -> float:
    """Nats by which the changed weights moved a log-prob. Raises CheckFailed: hardly."""
    moved, _ = _differences(first, second)
    if not moved >= PLAIN_CHANGE:
        raise CheckFailed(f"the changed weights changed nothing: {moved:.3g} nats")
    return moved


def _updated(context: Context, folder: str) -> tuple[Figures, Scores]:
    """The syncs. Saves the changed weights into `folder`; returns the figures and what the engine
    scored with those."""
    cfg = _config(context, dtype_of(context), mode="delta")
    model = _Model.load(cfg, context.device)
    sequences = _sequences(cfg)
    engine = ReplicaWithSender(cfg, context.device, model.tensors())
    dtype = cfg.model.dtype
    loaded = _Loaded(engine, sequences)
    figures: Figures = {"start, s": engine.start_s}
    figures["loaded, engine to HF"] = _require_close(
        loaded.scores, model.score(sequences), dtype, "the checkpoint in engine and HF"
    )
    engine.sync(0)
    original = {name: tensor.clone() for name, tensor in model.tensors().items()}
    model.add_noise(1)
    changed = engine.sync(1)
    figures["new weights"] = _require_in_place(changed, context.device)
    _save(model, cfg, folder)
    new_scores = engine.score(sequences)
    figures["changed, engine to HF"] = _require_close(
        new_scores, model.score(sequences), dtype, "changed weights in engine and HF"
    )
    figures["changed, one by one to at once"] = _require_graphs_right(engine, sequences, dtype)
    figures["moved, nats"] = _require_moved(new_scores, loaded.scores)
    for name, tensor in model.tensors().items():
        tensor.copy_(original[name])
    engine.sync(2)
    figures["after the way back"] = loaded.compare("the first weights, sent again")
    return figures, new_scores


def sleep_and_wake(context: Context) -> Figures:
    """Sleep at level 2, which drops the weights; a sync must bring everything back."""
    cfg = _config(context, dtype_of(context), sleeps=True)
    model = _Model.load(cfg, context.device)
    sequences = _sequences(cfg)
    engine = ReplicaWithSender(cfg, context.device, model.tensors())
    weights_bytes = sum(tensor.nbytes for tensor in model.tensors().values())
    loaded = _Loaded(engine, sequences)
    figures: Figures = {"start, s": engine.start_s}
    for version in range(2):
        before = torch.cuda.mem_get_info()[0]
        engine.sleep()
        freed = torch.cuda.mem_get_info()[0] - before
        figures[f"freed by sleep {version + 1}, GiB"] = freed / 2**30
        begin = time.perf_counter()
        engine.sync(version)
        figures[f"wake and sync {version + 1}, s"] = time.perf_counter() - begin
        figures[f"after wake {version + 1}"] = loaded.compare("after sleep and wake")
        _require_freed(freed, weights_bytes, figures)
    return figures


def _require_freed(freed: int, weights_bytes: int, figures: Figures) -> None:
    """Raises CheckFailed: sleep gave back less than the weights take."""
    if freed < weights_bytes:
        gib = f"{freed / 2**30:.2f} GiB back, the weights have {weights_bytes / 2**30:.2f}"
        raise CheckFailed(f"sleep gave {gib}", figures)


def trainer_difference(context: Context) -> Figures:
    """The same checkpoint in bfloat16, in the engine and in the trainer's own worker."""
    cfg = _config(context, "bfloat16")
    sequences = _sequences(cfg)
    # One after the other: vLLM measures the GPU's memory while it starts.
    scores = []
    for name, function in (("engine", _engine_scores), ("trainer", _worker_scores)):
        job = (function, (cfg, context.device, sequences))
        scores += all_results(run_peers([job], context.limit_s / 2), [name])
    engine, worker = scores
    largest, mean = _differences(engine, worker)
    _require_close(engine, worker, "bfloat16", "engine and trainer")
    return {"largest, nats": largest, "mean, nats": mean}


def _engine_scores(cfg: Config, device: str, sequences: list[np.ndarray], path: str = "") -> Scores:
    """What a new engine scores, with the weights in `path` instead of the config's."""
    cfg.model.path = path or cfg.model.path
    model = _Model.load(cfg, device)
    return ReplicaWithSender(cfg, device, model.tensors()).score(sequences)


def _worker_scores(cfg: Config, device: str, sequences: list[np.ndarray]) -> Scores:
    worker = policy_worker(cfg, device)
    set_up(worker)
    return worker.score(sequences)
