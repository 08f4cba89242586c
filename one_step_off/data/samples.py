"""What flows through the pipeline: prompts, samples and batches. Plain numpy, no torch."""

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from one_step_off.config.plain_values import plain_number, plain_value
from one_step_off.data.arrays import chunks

PromptId = tuple[int, int]
"""A prompt's id: (epoch, row). It is unique in a run."""

PolicyVersion = tuple[int, int]
"""The weights that generated a token: (attempt of the trainer, weight version)."""

NOT_GENERATED = -1
"""The version of a token that the policy did not generate: a tool or the user wrote it. Never
trained on.
"""

AGENT_ERROR = "agent/errors"

TIME_PARTS = ("queue", "prefill", "decode", "tool", "reward")
"""Where the time of a trajectory goes, from when its replica has it to its reward: it waits for the
engine, or in it; the engine reads its contexts; the engine writes its turns; tools, environment and
the loop's own code run, or an external agent; the reward function scores it."""

FAULT_METRICS = ("reward/errors", "reward/timeouts", AGENT_ERROR)
"""What can go wrong with a sample; each is the name of the metric that counts it."""


@dataclass(frozen=True)
class Prompt:
    """One row of data, tokenized.

    Attributes:
        id: (epoch, row).
        ids: int32 [P], the token ids of the prompt.
        text: what the token ids came from.
        ground_truth, data_source: arguments of the reward function.
        extra: the row's other columns, for reward functions that take `extra_info`.
        messages: the chat, normalized (see `data/messages.py`).
        tools: the row's own tools; None: those of its agent loop.
        chat_template_kwargs: the settings of the chat template.
        agent_loop: the loop of this row; empty: that of the config.
        where: "file:row" for messages, rows counted from 1.
        source: the name of its source in `data.train_files`, whose reward function and limits hold
            for it; empty: none.
        images: the encoded files of its images. In `ids` each has as many tokens as parts.
    """

    id: PromptId
    ids: np.ndarray
    text: str
    ground_truth: str
    data_source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    agent_loop: str = ""
    where: str = ""
    source: str = ""
    images: tuple[bytes, ...] = ()


PromptLookup = Callable[[PromptId], Prompt | None]
"""Returns the prompt of an id, or None where it is not known."""


@dataclass
class Sample:
    """One trajectory. All per-token arrays have the length R of the response, which may span
    several turns.

    Attributes:
        prompt_id: (epoch, row) of its prompt; samples with the same prompt_id form a group.
        index: position of its episode in the group, 0 to n - 1.
        prompt_ids: int32 [P].
        response_ids: int32 [R]; exactly the ids that the engine sampled, and between turns those of
            tools.
        log_probs: float32 [R], in nats: log mu(token) from the engine, after temperature; 0 for
            tokens that were not generated.
        loss_mask: bool [R]; True where the policy generated the token and it is trained on.
        versions: int32 [R]; the weight version that generated each token, stamped by the engine;
            NOT_GENERATED for other tokens.
        attempt: which attempt of the trainer made those weights.
        reward: score of the whole trajectory; NaN until scored.
        finish_reason: "stop" or "length", as vLLM reports it, or a limit of the conversation, see
            agent_loop.base.Trajectory.
        response: the decoded response, of all turns, without special tokens.
        prompt_experts, response_experts: with `rollout.replay_routing` the experts that the engine
            chose for each token: uint8, or uint16 of more than 256 experts, [P, layers, experts per
            token] and [R - 1, ...]. The model has not read the last token. None: not known for
            every token.
        seconds: of each of TIME_PARTS. Of the samples of an episode only the first has them. Turns
            that are generated at the same time count each.
        extra: what only some samples have:
            reward_parts: name -> float.
            baseline: the reward of the greedy response to the same prompt.
            greedy: this is that greedy response; it is scored and never trained on.
            replaces: the prompt ids of the zero-variance groups that dynamic sampling replaced;
                only the first sample of the new groups has it.
            replaced_visits: what became of these groups, see data/difficulty.py.
            replaced_work: what the engine did for them, see data/token_work.py.
            error: one line: why its reward is 0.
            fault: which of FAULT_METRICS the error counts in.
            dropped: its group was taken out of the batch, because of an error in it.
            carried: by how many steps it is trained later than in the order in which prompts
                began, see rollout/prompt_pool.py.
            agent_failure: one line: how its agent failed, where a limit of the run excuses it.
            agent_log: what its external agent printed, a file below the run folder.
            draft_tokens: with `rollout.speculation` [proposed, accepted, all tokens] of the turns
                that the engine has counted; in the first sample of a trajectory.
            agent: name -> float: turns, tool_calls and other counts of a conversation. The turns
                are those of the sample, everything else is counted over its episode.
            tool_calls: the calls in this sample, in order: {"turn", "name", "arguments"} each.
            segment: of an episode with several samples: {"index": its number among them from 0,
                "count": how many they are, "parent": the segment whose turns its context contains,
                -1: none}. They have the same prompt_id, index and reward, and the same extras but
                for tool_calls and the agent's turns, see data/episodes.py.
    """

    prompt_id: PromptId
    index: int
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    log_probs: np.ndarray
    loss_mask: np.ndarray
    versions: np.ndarray
    attempt: int = 0
    reward: float = float("nan")
    finish_reason: str = ""
    response: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    prompt_experts: np.ndarray | None = None
    response_experts: np.ndarray | None = None

    @property
    def experts(self) -> np.ndarray | None:
        """Those of all tokens but the last, [P + R - 1, layers, experts per token]; None: not
        known."""
        if self.prompt_experts is None or self.response_experts is None:
            return None
        return np.concatenate([self.prompt_experts, self.response_experts])

    @property
    def length(self) -> int:
        """Tokens of prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)


TOKEN_FIELDS = ("response_ids", "log_probs", "loss_mask", "versions")
"""The fields of a Sample that hold one value per response token."""

TRAINER_FIELDS = (
    *("advantages", "old_log_probs", "ref_log_probs", "values", "returns"),
    *("teacher_top_ids", "teacher_top_log_probs"),
)
"""The fields of a Batch that trainers read, besides its samples."""

NOT_STORED = ([None] * (1 + len(TRAINER_FIELDS)), None)
"""`Batch.stored` of a batch that is not in Ray's object store."""


@dataclass
class Batch:
    """The samples of one training step, ordered by (position of the prompt in the step, index,
    segment of the episode).

    Attributes:
        step: the training step.
        samples: B samples.
        expected_stamp: the stamp that every token must have, or, with `max_version_lag`, the
            newest.
        max_version_lag: by how much the version of a token may be older.
        past: earlier attempt -> its newest version that these weights come from. Samples of
            earlier attempts have such versions.
        advantages, old_log_probs, ref_log_probs, values, returns: float32 [R] per sample, or None
            where the step does not use them. `old_log_probs`: of the proximal policy (decoupled
            PPO); `values`: of the critic before the update; `returns`: what the critic is trained
            on.
        teacher_top_ids, teacher_top_log_probs: int32 and float32 [R, k] per sample: the teacher's
            likeliest tokens in place of each response token (`teacher.top_k`).
        teacher_log_probs: float32 [R] per sample: of the response tokens, by the teacher.
        teacher_names: of each sample's teacher, where the run has several.
        prob_squares: float32 [R] per sample: the sum of squared probabilities of the proximal
            policy.
        episodes: int64 [B], see `episode_numbers`: set where a batch travels without its samples'
            extras. None: the extras say it.
        images: of the prompts that have some; set where a batch is sent to a role's ranks.
        prefixes: of the samples, see `algorithms/shared_prefixes`: set where ranks that share them
            are sent the batch without the tokens of all samples.
        dropped: samples that `drop` took out.
        greedy: the greedy responses, once they are baselines: generated and never trained on.
        notes: further entries of the step's row in ledger.jsonl.
        stored: the objects that were last put into Ray's object store, and the references to them
            by the way in which the batch was divided.
    """

    step: int
    samples: list[Sample]
    expected_stamp: PolicyVersion
    max_version_lag: int = 0
    past: dict[int, int] = field(default_factory=dict)
    advantages: list[np.ndarray] | None = None
    old_log_probs: list[np.ndarray] | None = None
    ref_log_probs: list[np.ndarray] | None = None
    values: list[np.ndarray] | None = None
    returns: list[np.ndarray] | None = None
    teacher_top_ids: list[np.ndarray] | None = None
    teacher_top_log_probs: list[np.ndarray] | None = None
    teacher_log_probs: list[np.ndarray] | None = None
    teacher_names: list[str] | None = None
    prob_squares: list[np.ndarray] | None = None
    episodes: np.ndarray | None = None
    images: dict[PromptId, tuple[bytes, ...]] = field(default_factory=dict)
    prefixes: np.ndarray | None = None
    dropped: list[Sample] = field(default_factory=list)
    greedy: list[Sample] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    stored: tuple[list, Any] = NOT_STORED

    def set_columns(self, answers: dict[str, Any]) -> None:
        """Set fields by name. A role that gives several answers with a dict of them."""
        for name, answer in answers.items():
            if isinstance(answer, dict):
                self.set_columns(answer)
            else:
                setattr(self, name, answer)

    def prompt_order(self) -> list[PromptId]:
        """The prompts of this step, each once, in order; dropped ones come last."""
        return list(dict.fromkeys(sample.prompt_id for sample in self.samples + self.dropped))

    def drop(self, prompts: Collection[PromptId]) -> None:
        """Take all samples of these prompts out of the batch, with their per-sample arrays."""
        all_samples = self.samples
        keeps = [sample.prompt_id not in prompts for sample in all_samples]
        for name, values in vars(self).items():
            if isinstance(values, list) and name not in ("dropped", "greedy"):
                setattr(self, name, list(itertools.compress(values, keeps)))
        self.prefixes = None
        self.dropped = []
        for sample in all_samples:
            if sample.prompt_id in prompts:
                self.dropped.append(replace(sample, extra=sample.extra | {"dropped": True}))


def share_prompt_experts(samples: list[Sample]) -> None:
    """Let the samples of a prompt hold one array for the prompt's experts, where these are equal:
    it travels once, and takes memory once."""
    known: dict[PromptId, np.ndarray] = {}
    for sample in samples:
        if sample.prompt_experts is not None:
            first = known.setdefault(sample.prompt_id, sample.prompt_experts)
            if np.array_equal(first, sample.prompt_experts):
                sample.prompt_experts = first


def make_plain(sample: Sample) -> None:
    """Bring what an agent loop put into a sample, beside its arrays, into types that checkpoints
    hold. Raises UnstorableValue: one of them has no such type."""
    for name in ("index", "attempt", "reward", "finish_reason", "response", "extra"):
        setattr(sample, name, plain_value(getattr(sample, name), f"the sample's {name}"))
    if "agent" in sample.extra:
        facts = sample.extra["agent"].items()
        sample.extra["agent"] = {name: plain_number(value, f"fact {name}") for name, value in facts}


def generated_tokens(samples: list[Sample]) -> tuple[np.ndarray, float, float]:
    """The tokens that the policy generated, by their version stamps.

    Returns:
        How many each response has, int64 [B]; their oldest version; their newest version. The
        versions are NaN where there are no such tokens.
    """
    counts: list[int] = []
    oldest: list[int] = []
    newest: list[int] = []
    for versions_of_chunk in chunks([sample.versions for sample in samples]):
        versions = np.concatenate(versions_of_chunk)
        if NOT_GENERATED in versions:
            versions = versions[versions != NOT_GENERATED]
            versions_of_chunk = [own[own != NOT_GENERATED] for own in versions_of_chunk]
        counts += map(len, versions_of_chunk)
        if len(versions):
            oldest.append(versions.min())
            newest.append(versions.max())
    return (
        np.array(counts, np.int64),
        float(min(oldest, default=np.nan)),
        float(max(newest, default=np.nan)),
    )
