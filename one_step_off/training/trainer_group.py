"""`WorkerGroup`: the ranks of one role as a few awaitable methods, each with a time limit."""

import asyncio
import operator
import os
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np

from one_step_off.algorithms import batching
from one_step_off.algorithms.shared_prefixes import prefixes_of
from one_step_off.cluster.remote_calls import call_all, call_each, now, observed
from one_step_off.cluster.run_events import RunEvents
from one_step_off.config.placement import start_limit_s
from one_step_off.config.roles import role_settings
from one_step_off.config.schema import Config
from one_step_off.data.episodes import episodes_of
from one_step_off.data.images import Images
from one_step_off.data.packing import (
    ArraySlice,
    BatchOutline,
    PackedArrays,
    PackedSamples,
    SampleSlice,
)
from one_step_off.data.samples import (
    NOT_STORED,
    TRAINER_FIELDS,
    Batch,
    PromptId,
    PromptLookup,
    Sample,
)
from one_step_off.training.device_memory import with_memory_advice
from one_step_off.training.worker_interface import BatchShare
from one_step_off.training.written_files import FileFacts

T = TypeVar("T")

UNREAD_FIELDS = ("response", "seconds", "extra")
"""The fields of a Sample that no rank reads."""

WHOLE_BATCH = "whole"
"""The key of a batch that is not divided, in `Batch.stored`."""


class Colocated(Protocol):
    """The replicas that share the trainer's devices."""

    async def sleep(self) -> None:
        """Free the devices' memory; does nothing where it is free already."""


class WorkerGroup:
    """All ranks of one role. Their methods are collective: every call goes to every rank.

    Roles in one pool share a device lock, so that one uses the devices at a time; roles in
    different pools run at once.

    Attributes:
        shares: of each rank its part of a batch, known after `setup`.
        has_answered: whether all ranks have answered once. Before, one that does not answer may be
            starting; from then on it hangs.
        colocated: the replicas in the same pool; None: they have devices of their own.
        find_prompt: the prompt of a sample, for its images; None: the model reads none.
    """

    def __init__(
        self,
        role: str,
        ranks: list[Any],
        cfg: Config,
        device_lock: asyncio.Lock | None = None,
        host: str = "",
        events: RunEvents | None = None,
    ) -> None:
        """
        Args:
            ranks: the Ray actors, rank 0 first.
            device_lock: of the role's pool; None: the role has the pool alone.
            host: the address at which the ranks meet; empty: rank 0's address on the network.
            events: receives the span of each call that uses the devices.
        """
        self.find_prompt: PromptLookup | None = None
        self.role = role
        self.ranks = ranks
        self.cfg = cfg
        self.host = host
        self.device_lock = device_lock or asyncio.Lock()
        self.time_limit_s = cfg.trainer.step_timeout_s
        self.shares: list[BatchShare] = []  # of each rank; empty: not known, before `setup`
        self.has_answered = False
        self.colocated: Colocated | None = None
        self.events = events or RunEvents()

    async def setup(self) -> None:
        """Form the role's process group and load the model on every rank."""
        time_limit_s = self.cfg.trainer.start_timeout_s
        await call_all(time_limit_s, self.role, self.ranks, "alive")
        self.has_answered = True
        rank_0 = self.ranks[:1]
        (address,) = await call_all(time_limit_s, self.role, rank_0, "free_address", self.host)
        loading_limit_s = start_limit_s(self.cfg, self.role)
        loading = call_all(loading_limit_s, self.role, self.ranks, "setup", *address)
        await with_memory_advice(self.cfg, self.role, loading)
        self.shares = await call_all(time_limit_s, self.role, self.ranks, "share_of_batch")

    def _batch_for_ranks(self, batch: Batch, prompts_per_mini_batch: int = 0) -> list[Any]:
        """Per rank a reference to what it needs of a batch: everything where all ranks compute the
        same share or it is not known, else its share.

        Args:
            batch: of a step.
            prompts_per_mini_batch: of an update; 0: the whole batch is planned at once.
        """
        if self.find_prompt is not None:
            batch.images = images_of(batch.samples, self.find_prompt)
        if not self.shares or self.shares[0].count == 1:
            return [put_batch(batch)] * len(self.ranks)
        references = put_slices(batch, self.shares[0], prompts_per_mini_batch)
        return [references[share.index] for share in self.shares]

    async def _on_devices(
        self, step: int, method: str, batch_for_ranks: list[Any], *args: Any
    ) -> list[Any]:
        """Call a method on all ranks while this role alone uses the devices; returns every rank's
        answer.

        Args:
            step: of the batch.
            method: of the ranks.
            batch_for_ranks: each rank's first argument.
            args: the further arguments.
        """
        async with self.device_lock:
            if self.colocated is not None:
                await self.colocated.sleep()
            begin = now()
            what = f"step {step}, {self.role}"
            arguments = [(batch, *args) for batch in batch_for_ranks]
            work = call_each(self.time_limit_s, what, self.ranks, method, arguments)
            answers = await with_memory_advice(self.cfg, self.role, work)
            self.events.span(self.role, method, step, begin, now())
        return answers

    async def update(self, batch: Batch, learn: bool = True) -> dict[str, float]:
        """One training step on all ranks; returns its metrics. Without `learn` it counts and
        nothing changes."""
        profile = ""
        if batch.step == self.cfg.trainer.profile_step:
            # Absolute: the workers may have another working directory.
            profile = os.path.abspath(f"{self.cfg.trainer.output_dir}/profile")
        mini_batch = getattr(role_settings(self.cfg, self.role), "ppo_mini_batch_size", 0)
        stored = self._batch_for_ranks(batch, mini_batch)
        answers = await self._on_devices(batch.step, "update", stored, learn, profile)
        return answers[0]  # the same on every rank

    async def log_prob(self, batch: Batch) -> list[np.ndarray]:
        """Log-probs (nats) of all response tokens at the current weights: one float32 [R] per
        sample."""
        return merged(await self._on_devices(batch.step, "log_prob", self._batch_for_ranks(batch)))

    async def log_prob_and_squares(self, batch: Batch) -> list[np.ndarray]:
        """As `log_prob`, float32 [R, 2]: beside each log-prob the sum of all the vocabulary's
        squared probabilities."""
        stored = self._batch_for_ranks(batch)
        return merged(await self._on_devices(batch.step, "log_prob_and_squares", stored))

    async def values(self, batch: Batch) -> list[np.ndarray]:
        """The critic's values of the states before all response tokens: one float32 [R] per
        sample."""
        return merged(await self._on_devices(batch.step, "values", self._batch_for_ranks(batch)))

    def score(
        self, sequences: list[np.ndarray], images: Sequence[Images] = ()
    ) -> Awaitable[list[np.ndarray]]:
        """The trainer's half of the canary: log-probs of every token but the first, at temperature
        1.

        The calls are sent now, so the weights are those of now, whatever is called before this is
        awaited. `images`: of each sequence; (): none has any.
        """
        what = f"canary, {self.role}"
        arguments = (sequences, images) if images else (sequences,)
        answers = call_all(self.time_limit_s, what, self.ranks, "score", *arguments)

        async def first_report() -> list[np.ndarray]:
            return next(scores for scores in await answers if scores)

        return observed(first_report())

    async def save_state(self, folder: str) -> Awaitable[FileFacts]:
        """Let all ranks copy their part of a checkpoint. Returns an awaitable: once awaited, they
        have written it; it gives sizes and checksums of their files."""
        what = f"checkpoint, {self.role}"
        await call_all(self.time_limit_s, what, self.ranks, "save_state", folder)
        writing = call_all(self.time_limit_s, what, self.ranks, "saved")

        async def facts_of_all_ranks() -> FileFacts:
            facts: FileFacts = {}
            for facts_of_rank in await writing:
                facts |= facts_of_rank
            return facts

        return facts_of_all_ranks()

    async def load_state(self, folder: str) -> None:
        """Load a checkpoint's state; after `setup`."""
        what = f"checkpoint, {self.role}"
        await call_all(self.time_limit_s, what, self.ranks, "load_state", folder)

    async def stop(self) -> None:
        """End what would outlive the ranks: nothing, for those of a training back end."""

    async def save_hf(self, path: str) -> None:
        """Write a Hugging Face checkpoint."""
        await call_all(self.time_limit_s, self.role, self.ranks, "save_hf", path)


def merged(shares: list[dict[int, T]]) -> list[T]:
    """The ranks' shares, put back in order."""
    answers: dict[int, T] = {}
    for share in shares:
        answers.update(share)
    return [answers[i] for i in range(len(answers))]


def images_of(samples: list[Sample], find_prompt: PromptLookup) -> dict[PromptId, Images]:
    """The images of the prompts that have some, once per prompt."""
    images: dict[PromptId, Images] = {}
    for prompt_id in {sample.prompt_id for sample in samples}:
        prompt = find_prompt(prompt_id)
        if prompt is None:
            raise RuntimeError(
                f"prompt {prompt_id}: its images are not known; it is not of the data"
            )
        if prompt.images:
            images[prompt_id] = prompt.images
    return images


def put_batch(batch: Batch) -> Any:
    """Put a batch into Ray's object store, and return the reference.

    Only once for all roles and ranks, until one of its columns changes; without what no rank reads.
    """
    import ray

    references = _stored_references(batch)
    if WHOLE_BATCH not in references:
        samples = PackedSamples(batch.samples)
        samples.omitted_fields = UNREAD_FIELDS
        columns: dict[str, Any] = {"prefixes": None}  # each rank has the tokens
        for name in TRAINER_FIELDS:
            values = getattr(batch, name)
            columns[name] = PackedArrays(values) if values else values
        references[WHOLE_BATCH] = ray.put(_sent_form(batch, samples, columns))
    return references[WHOLE_BATCH]


def put_slices(batch: Batch, share: BatchShare, prompts_per_mini_batch: int) -> list[Any]:
    """Put each share of a batch into Ray's object store, and return the references.

    Only once for all roles that divide the batch alike, until one of its columns changes.

    Args:
        batch: of a step.
        share: of any rank: into how many shares the batch is divided, how lengths are padded, and
            which prefixes are shared.
        prompts_per_mini_batch: of an update; 0: the whole batch is planned at once.
    """
    import ray

    prompts = [sample.prompt_id for sample in batch.samples]
    mini_batches = [list(range(len(prompts)))]
    if prompts_per_mini_batch:
        mini_batches = batching.split_into_mini_batches(prompts, prompts_per_mini_batch)
    if len(mini_batches) == 1:  # as without mini-batches
        prompts_per_mini_batch = 0
    layout = (share.count, share.width_multiple, share.sharing)
    division = (*layout, len(mini_batches), prompts_per_mini_batch)
    references = _stored_references(batch)
    if division not in references:
        lengths = [sample.length for sample in batch.samples]
        prefixes = None if share.sharing is None else _known_prefixes(batch)
        positions_of_share = batching.positions_of_shares(
            lengths, mini_batches, *layout[:2], prefixes, share.sharing
        )
        outline = BatchOutline.of(batch.samples, batch.expected_stamp)
        references[division] = [
            ray.put(_slice(batch, positions, outline)) for positions in positions_of_share
        ]
    return references[division]


def _known_prefixes(batch: Batch) -> np.ndarray:
    """`Batch.prefixes`, found once; again when samples were taken out since."""
    if batch.prefixes is None or len(batch.prefixes) != len(batch.samples):
        batch.prefixes = prefixes_of(batch.samples)
    return batch.prefixes


def _slice(batch: Batch, positions: list[int], outline: BatchOutline) -> Batch:
    """What the ranks of one share get."""
    samples = SampleSlice(batch.samples, positions, outline, UNREAD_FIELDS)
    own_prompts = {batch.samples[position].prompt_id for position in positions}
    images = {prompt: own for prompt, own in batch.images.items() if prompt in own_prompts}
    columns: dict[str, Any] = {"images": images}
    for name in TRAINER_FIELDS:
        values = getattr(batch, name)
        columns[name] = ArraySlice(values, positions, outline) if values else values
    return _sent_form(batch, samples, columns)


def _sent_form(batch: Batch, samples: list[Sample], columns: dict[str, Any]) -> Batch:
    return replace(
        batch,
        samples=samples,
        prob_squares=None,
        teacher_log_probs=None,
        teacher_names=None,
        episodes=episodes_of(batch),
        dropped=[],
        stored=NOT_STORED,
        **columns,
    )


def _stored_references(batch: Batch) -> dict[Any, Any]:
    """The references to the batch as it is now, by the way in which it is divided."""
    contents = [batch.samples, *(getattr(batch, name) for name in TRAINER_FIELDS)]
    stored_contents, references = batch.stored
    if references is None or not all(map(operator.is_, contents, stored_contents)):
        references = {}
        batch.stored = (contents, references)
    return references
