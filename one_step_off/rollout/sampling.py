"""How responses are sampled, and the seeds that make sampling repeat."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of one generation call.

    Attributes:
        n: trajectories per prompt.
        temperature: 0 is greedy decoding.
        seed: the run's seed, from which each sample gets its own; None: unseeded.
        top_p: for evaluation only, because values other than 1 shift the log-probs.
        max_tokens: tokens of a response at most; None: as in training.
        greedy: generate one more response per prompt at temperature 0, with index n and
            `extra["greedy"]`. It is a baseline, and never trained on.
        stop: texts at which a turn ends, besides those of `rollout.sampling_kwargs`.
    """

    n: int
    temperature: float
    seed: int | None
    top_p: float = 1.0
    max_tokens: int | None = None
    greedy: bool = False
    stop: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Trajectories per prompt, the greedy one included."""
        return self.n + self.greedy


def sample_seed(seed: int, prompt_id: tuple[int, int], index: int, turn: int = 0) -> int:
    """The seed of one sample and turn: 63 bits of a hash of (run seed, epoch, row, index, turn).

    Neighboring integers would not do: vLLM derives further seeds by adding to a seed, so they would
    collide.
    """
    text = f"{seed}/{prompt_id[0]}/{prompt_id[1]}/{index}"
    if turn:
        text += f"/{turn}"
    return _hash64(text) >> 1


def engine_seed(seed: int, attempt: int, replica: int, start: int) -> int:
    """The seed of one engine, for samples without a seed of their own: 31 bits (numpy takes 32) of
    a hash.

    With one seed for all engines, the k-th request of every replica, and of every restarted one,
    would get the same noise: vLLM draws it from generators that each engine seeds at its start. All
    workers of one engine must have the same seed.

    Args:
        seed: the run's seed.
        attempt: the trainer's attempt.
        replica: the index of the replica.
        start: how often this replica was started before.
    """
    text = f"engine/{seed}/{attempt}/{replica}/{start}"
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def _hash64(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
