"""Sequences that begin alike, as the n samples of a prompt and the segments of an episode do: their
common first tokens can be computed once.

    plain     prompt  turn 1  turn 2           shared, in lexical order of the tokens
              prompt  turn 1  other turn 2     prompt  turn 1  turn 2
              prompt  other turn 1                             other turn 2
                                                       other turn 1

In the shared form a sequence has only what it does not have in common with the one before it; it
attends to the common tokens where they stand, and to its own, at the positions that it has alone.
So all outputs and gradients are those of the plain form, but for rounding. In lexical order no
earlier sequence has more in common with it: every token of the tree is there once.

Pure numpy. `batching.rows_that_pay` decides by a cost rule what is shared. It reads lengths alone,
so all ranks and the driver decide alike.
"""

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from one_step_off.data.packing import token_ids_of
from one_step_off.data.samples import Sample

Prefixes = np.ndarray
"""int64 [B, 2] of B sequences: the place of a sequence in an order of all, and how many first
tokens it has in common with the one before it in that order; 0: it shares none, and a row begins
with it."""


@dataclass(frozen=True)
class SharingRule:
    """When to compute common tokens once. Costs are in FLOPs of a forward pass through all layers
    of the model, as fast as the device makes them for long rows.

    Attributes:
        token: of a token that passes through the layers, without attention.
        pair: of a pair of tokens, of which the later one attends to the earlier one.
        masked: share of the masked pairs of a sequence that continues another one, later tokens
            among its own, that its attention computes, too.
        least_saving: by a row below which it stays plain.
        least_gain: share of its cost alone that a sequence must save.
        row_tokens: the most tokens of a shared row.
    """

    token: float
    pair: float
    masked: float
    least_saving: float
    least_gain: float
    row_tokens: int

    def cost(self, lengths: np.ndarray, common: np.ndarray | int = 0) -> np.ndarray:
        """Of each of some sequences, without the tokens in `common`, which it attends to."""
        own = lengths - common
        pairs = own * lengths - own**2 / 2
        pairs += np.where(common > 0, self.masked * own**2 / 2, 0)
        return self.token * own + self.pair * pairs


def prefixes_of(samples: list[Sample]) -> Prefixes:
    """The common prefixes of the samples of each prompt, whose tokens are all here."""
    prompts = [sample.prompt_id for sample in samples]
    return find_prefixes(prompts, [token_ids_of(sample) for sample in samples])


def find_prefixes(groups: Sequence[Hashable], sequences: Sequence[np.ndarray]) -> Prefixes:
    """The order in which the sequences of each group have the most tokens in common. Each sequence
    has at least one token of its own.

    Args:
        groups: of each sequence; tokens are shared within a group.
        sequences: token ids, int [L] each.
    """
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    prefixes = np.zeros((len(sequences), 2), np.int64)
    place = 0
    for indices in members.values():
        # Big-endian bytes sort as the tokens do.
        ordered = sorted(indices, key=lambda i: sequences[i].astype(">u4").tobytes())
        prefixes[ordered, 0] = place + np.arange(len(ordered))
        place += len(ordered)
        for before, index in itertools.pairwise(ordered):
            prefixes[index, 1] = _common_length(sequences[before], sequences[index])
    return prefixes


def _common_length(before: np.ndarray, own: np.ndarray) -> int:
    """The number of first tokens that two sequences have in common, less than the length of the
    second."""
    longest = min(len(before), len(own) - 1)
    differs = before[:longest] != own[:longest]
    return int(np.argmax(differs)) if differs.any() else max(longest, 0)


def rows_of(prefixes: Prefixes) -> list[np.ndarray]:
    """The indices of the sequences of each row, in the order in which they share tokens."""
    order = np.argsort(prefixes[:, 0])
    begins = np.flatnonzero(prefixes[order, 1] == 0)
    return np.split(order, begins[1:])
