"""What a step has to do, and how many seconds that takes: `Work`."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Work:
    """What a step has to do, and how many seconds that takes.

    Generation: all sequences that a replica generates, `running` of them, advance by one token in
    decode_s + sequence_s * running: reading the weights costs the same for one as for many, the
    rest is per sequence. At most `places` run at once, the others wait (vLLM's continuous batching,
    first come, first served; prompts cost nothing apart). So the longest response takes decode_s a
    token at least, however many replicas there are.

    Training, log-probs and the driver's part included: train_fixed_s + train_token_s * tokens /
    ranks, of the tokens of prompts and responses; the first optimizer step comes after the share
    `before_step` of it.

    The sync: sync_s, of which the trainer scores its half of the canary in the first canary_s,
    then the replicas receive the weights for transfer_s, then they score the canary for
    replica_canary_s. Handing devices over in the colocated arrangement costs nothing. On a shared
    device both work at half speed while both work. With shared idle cores a side is faster while
    the other waits.

    Attributes:
        prompts: of a step.
        lengths: response lengths in tokens, int [groups, n]; each prompt draws a row.
        prompt_tokens: of each prompt.
        decode_s: seconds for a token, however many sequences run.
        sequence_s: seconds more for a token, for each sequence that runs.
        train_fixed_s: seconds of training that more ranks do not make shorter.
        train_token_s: seconds of training for a token on one rank.
        sync_s: seconds of a weight sync, both halves of the canary included.
        canary_s: seconds of the sync in which the trainer is busy.
        before_step: share of training before the first optimizer step, 0 to 1.
        places: sequences that a replica runs at once, at most.
        replica_canary_s: seconds of the sync in which the replicas score the canary.
    """

    prompts: int
    lengths: np.ndarray
    prompt_tokens: float
    decode_s: float
    sequence_s: float
    train_fixed_s: float
    train_token_s: float
    sync_s: float
    canary_s: float = 0.0
    before_step: float = 1.0
    places: int = 256
    replica_canary_s: float = 0.0

    @property
    def transfer_s(self) -> float:
        """Seconds of the sync between the two halves of the canary: the replicas pause, receive
        and load."""
        return max(0.0, self.sync_s - self.canary_s - self.replica_canary_s)
