"""The real pipeline on stand-ins for replicas and ranks."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from benchmarks.overhead.cell import SAMPLES_PER_PROMPT, Cell
from benchmarks.overhead.stand_ins import LoggedCall, Rank, Replica
from one_step_off.config.schema import Config
from one_step_off.data.prompt_stream import PromptStream
from one_step_off.data.samples import Prompt, Sample
from one_step_off.monitoring.flops import Meter, ModelShape
from one_step_off.monitoring.loggers import open_loggers
from one_step_off.monitoring.tracker import Tracker
from one_step_off.ray_trainer import Pipeline, RunGroups
from one_step_off.rollout.health import ReplicaState
from one_step_off.rollout.replica_group import RolloutGroup
from one_step_off.training.trainer_group import WorkerGroup
from one_step_off.weight_sync.coordinator import WeightSync

PROMPT_TOKENS = 128
TOKEN_IDS = 32000


def make_config(cell: Cell, folder: str) -> Config:
    """The config of the run. `folder`: the run folder."""
    cfg = Config()
    cfg.trainer.output_dir = folder
    cfg.trainer.val_before_train = False
    cfg.trainer.val_after_train = False
    cfg.rollout.n = SAMPLES_PER_PROMPT
    cfg.rollout.routing = cell.routing
    cfg.data.train_batch_size = cell.prompts
    cfg.data.max_response_length = cell.tokens
    cfg.agent.max_concurrency = cell.slots
    if cell.full:
        cfg.algorithm.adv_estimator = "gae"
        cfg.algorithm.kl_in_reward = True
        cfg.algorithm.kl_coef = 0.01
    return cfg


def make_prompts(cell: Cell) -> list[Prompt]:
    """The prompts of all steps."""
    ids = np.arange(PROMPT_TOKENS, dtype=np.int32)
    question = "how many apples are there? " * 8
    return [Prompt((0, row), ids, question, "27") for row in range(cell.prompts * cell.steps)]


def ready_samples(cell: Cell, stream: PromptStream) -> dict[Any, list[Sample]]:
    """The samples of every prompt of the run, stamped with the version that its step expects.

    Every sample has arrays of its own, as after unpickling. Steps share the arrays, but for those
    of versions.
    """
    rng = np.random.default_rng(0)
    shape = (cell.samples, cell.tokens)
    ids = rng.integers(0, TOKEN_IDS, shape, np.int32)
    log_probs = -rng.random(shape, np.float32)
    masks = np.ones(shape, bool)
    text = "so it is 27 " * (cell.tokens // 4)
    ready: dict[Any, list[Sample]] = {}
    for step in range(stream.total_steps):
        versions = np.full(shape, max(0, step - 1), np.int32)
        for position, prompt in enumerate(stream.next_batch()):
            group = []
            for index in range(SAMPLES_PER_PROMPT):
                row = position * SAMPLES_PER_PROMPT + index
                sample = Sample(
                    prompt.id,
                    index,
                    prompt.ids,
                    ids[row],
                    log_probs[row],
                    masks[row],
                    versions[row],
                    reward=float(rng.integers(2)),
                    finish_reason="stop",
                    response=text,
                )
                group.append(sample)
            ready[prompt.id] = group
    return ready


def connected_sync(cell: Cell, actor: WorkerGroup, rollout: RolloutGroup) -> WeightSync:
    """The weight sync in the state after `connect`, without groups."""
    canary = [np.arange(8)] * 3
    no_shared_devices: list[list[int]] = [[]] * cell.ranks
    sync = WeightSync(actor, rollout.supervisor, canary, "127.0.0.1", no_shared_devices)
    sync.senders = actor.ranks
    sync.sending_ranks = actor.ranks
    sync.groups.replicas = list(rollout.replicas)
    sync.connect_info = {}
    sync.total_bytes = 10**9
    for health in rollout.supervisor.health:
        health.transition_to(ReplicaState.HEALTHY)
    return sync


def make_roles(
    cell: Cell, cfg: Config, ready: dict[Any, list[Sample]], log: list[LoggedCall]
) -> RunGroups:
    """Groups of stand-ins. `log` receives their calls."""
    first_step = list(ready.values())[: cell.prompts]
    values = [sample.log_probs for group in first_step for sample in group]

    def train_group(role: str) -> WorkerGroup:
        ranks = [Rank(index, cell, values, log) for index in range(cell.ranks)]
        return WorkerGroup(role, ranks, cfg)

    replicas = [Replica(cell, ready, log) for _ in range(cell.replicas)]
    rollout = RolloutGroup(replicas, cfg, False)
    actor = train_group("actor")
    roles = RunGroups(actor, rollout, connected_sync(cell, actor, rollout))
    if cell.full:
        roles.ref = train_group("ref")
        roles.critic = train_group("critic")
    return roles


def make_pipeline(cell: Cell, folder: str) -> tuple[Pipeline, list[LoggedCall]]:
    """The pipeline, and the list that receives the calls of its stand-ins."""
    cfg = make_config(cell, folder)
    prompts = make_prompts(cell)

    def prompt_stream() -> PromptStream:
        return PromptStream(prompts, cell.prompts, True, 0, cell.steps)

    log: list[LoggedCall] = []
    ready = ready_samples(cell, prompt_stream())
    roles = make_roles(cell, cfg, ready, log)
    tracker = Tracker(folder, cell.steps, out=io.StringIO())
    tracker.meter = Meter(cfg, ModelShape(10**9, 24, 2048))
    if cell.loggers:
        prompt_of = {prompt.id: prompt for prompt in prompts}.get
        tracker.loggers = open_loggers(cfg, 0, prompt_of, tracker.log, {})
    return Pipeline(cfg, roles, prompt_stream(), None, tracker), log
