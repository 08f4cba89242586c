"""The size of one measurement."""

from __future__ import annotations

from dataclasses import dataclass

SAMPLES_PER_PROMPT = 8
WARM_UP_STEPS = 2


@dataclass
class Cell:
    """One measurement, a cell of the table.

    Attributes:
        replicas: vLLM replicas.
        samples: samples of a step.
        tokens: tokens of each sample.
        ranks: trainer ranks of each role.
        slots: requests that a replica's engine works on at the same time.
        buckets: buckets of a weight sync.
        steps: steps of the run.
        generate_s: seconds of a step's generation.
        train_s: seconds of an update.
        sync_s: seconds of a weight sync.
        routing: as rollout.routing.
        loggers: whether the run logs to TensorBoard and samples to disk.
        full: with critic, reference model and GAE.
        profile: whether Python's profiler is on.
    """

    replicas: int
    samples: int
    tokens: int = 512
    ranks: int = 8
    slots: int = 256
    buckets: int = 24
    steps: int = 6
    generate_s: float = 0.3
    train_s: float = 0.5
    sync_s: float = 0.05
    routing: str = "least_loaded"
    loggers: bool = True
    full: bool = False
    profile: bool = False

    @property
    def prompts(self) -> int:
        """Prompts of a step."""
        return self.samples // SAMPLES_PER_PROMPT

    @property
    def log_prob_s(self) -> float:
        """Seconds of a pass that computes log-probs or values."""
        return self.train_s / 10

    @property
    def fixed_s(self) -> float:
        """Seconds of a step if the driver cost nothing: one step off, the sync during training."""
        training = self.train_s
        if self.full:
            training += self.log_prob_s
        return max(training, self.sync_s + self.generate_s)
