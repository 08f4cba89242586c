"""Whether speculation pays (`rollout.speculation`): measured in the engine, by batch size.

A step of a small batch waits for weights from memory, and verifies draft tokens in the same time.
That of a large batch computes longer for each draft token, accepted or rejected. So batches of
about equal size run with and without speculation, in short alternating blocks, and continue with
what made more tokens per second. Which tokens are sampled then depends on the clock, though not
their distribution: with seeded samples nothing is tried, and engines always speculate.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

BLOCK_STEPS = 16
TRIAL_STEPS = 8 * BLOCK_STEPS
SKIPPED_STEPS = 4
"""After a change: they have draft tokens from before it, and a GPU's are planned ahead."""

KEPT_STEPS = 64 * BLOCK_STEPS
"""Steps between two trials of a batch size: the policy changes, and what it repeats."""


@dataclass
class Trial:
    """What was counted of steps without and with speculation, in this order."""

    steps: list[int] = field(default_factory=lambda: [0, 0])
    tokens: list[int] = field(default_factory=lambda: [0, 0])
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])

    @property
    def rates(self) -> tuple[float, float]:
        """Tokens per second."""
        without, with_drafts = zip(self.tokens, self.seconds, strict=True)
        return without[0] / without[1], with_drafts[0] / with_drafts[1]


class Choice:
    """Whether batches of about one size speculate.

    Attributes:
        trial: under way; None: there is none.
        kept: steps since the last one.
    """

    def __init__(self) -> None:
        self.pays: bool | None = None  # by the last trial
        self.trial: Trial | None = Trial()
        self.kept = 0

    @property
    def speculates(self) -> bool:
        """Whether the next step does."""
        if self.trial is None:
            return bool(self.pays)
        return sum(self.trial.steps) // BLOCK_STEPS % 2 == 0

    def add(self, tokens: int, seconds: float) -> str:
        """Count a step that was made as `speculates` says. Returns the figures of a trial that ends
        with it and changes what is done, else ""."""
        trial = self.trial
        if trial is None:
            self.kept += 1
            if self.kept == KEPT_STEPS:
                self.trial, self.kept = Trial(), 0
            return ""
        arm = int(self.speculates)
        trial.steps[arm] += 1
        trial.tokens[arm] += tokens
        trial.seconds[arm] += seconds
        if sum(trial.steps) < TRIAL_STEPS:
            return ""
        without, with_drafts = trial.rates
        before, self.pays = self.pays, with_drafts >= without
        self.trial = None
        if self.pays is before:
            return ""
        return f"{with_drafts:,.0f} tokens/s with, {without:,.0f} without"


class SpeculationTrials:
    """Of one engine. Batches of 2^k to 2^(k+1) - 1 rows count as one size.

    Attributes:
        draft_tokens_by_rows: how many a sequence gets in a batch of each size: vLLM's
            `dynamic_sd_lookup`.
    """

    def __init__(
        self,
        tokens: int,
        most_rows: int,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            tokens: draft tokens for each row of a step.
            most_rows: of a batch.
            log: receives a line when a choice changes.
        """
        self.tokens = tokens
        self.log = log
        self.clock = clock
        self.draft_tokens_by_rows = [tokens] * (most_rows + 1)
        self.choices: dict[int, Choice] = {}  # by bits of the number of rows
        self.begin: float | None = None  # of the step under way; None: it cannot be timed
        self.speculates = True  # in the last step
        self.equal_steps = 0  # before the last one, that speculated as it did

    def interrupt(self) -> None:
        """The step under way is not timed: the engine waits for something else meanwhile."""
        self.begin = None

    def end_step(self, rows: int, tokens: int, is_decoding: bool, goes_on: bool) -> None:
        """Count a step that has ended.

        Args:
            rows: of its batch.
            tokens: that it made.
            is_decoding: it computed no prompts.
            goes_on: the next step follows at once.
        """
        now = self.clock()
        begin, self.begin = self.begin, now if goes_on else None
        if not rows:
            return
        size = rows.bit_length()
        choice = self.choices.setdefault(size, Choice())
        is_equal = choice.speculates == self.speculates
        self.equal_steps = self.equal_steps + 1 if is_equal else 0
        self.speculates = choice.speculates
        if begin is None or not is_decoding or self.equal_steps < SKIPPED_STEPS:
            return
        figures = choice.add(tokens, now - begin)
        smallest, largest = 1 << (size - 1), (1 << size) - 1
        if figures:
            state = "on" if choice.pays else "off"
            self.log(f"speculation {state} in batches of {smallest} to {largest}: {figures}")
        for count in range(smallest, min(largest + 1, len(self.draft_tokens_by_rows))):
            self.draft_tokens_by_rows[count] = self.tokens if choice.speculates else 0
