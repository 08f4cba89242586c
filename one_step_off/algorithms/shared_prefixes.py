"""Sequences that begin alike, as the n samples of a prompt do: their common first tokens can be
computed once.

    a family, plain     prefix  rest 1        a family, shared     prefix  rest 1  ...  rest n
                        prefix  rest 2
                        ...

In the shared form each rest attends to the prefix and to itself, at the positions that it has in
its own sequence. So all outputs and gradients are those of the plain form, but for rounding.

Pure numpy. `batching.rows_that_pay` decides by a cost rule which families share. It reads lengths
alone, so all ranks and the driver decide alike.
"""

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from one_step_off.data.packing import token_ids_of
from one_step_off.data.samples import Sample

Prefixes = np.ndarray
"""int64 [B, 2] of B sequences: the number of a sequence's family, and how many first tokens all
sequences of that family have in common; 0 for a sequence without one."""


@dataclass(frozen=True)
class SharingRule:
    """When to compute a common prefix once. Costs are in FLOPs of a forward pass through all layers
    of the model, as fast as the device makes them for long rows.

    Attributes:
        token: of a token that passes through the layers, without attention.
        pair: of a pair of tokens, of which the later one attends to the earlier one.
        segment: of one more part of a row, with an attention of its own.
        least_saving: by a family below which it stays plain.
        least_gain: share of its plain cost that a family must save.
        row_tokens: the most tokens of a shared row.
    """

    token: float
    pair: float
    segment: float
    least_saving: float
    least_gain: float
    row_tokens: int

    def plain_cost(self, lengths: np.ndarray) -> np.ndarray:
        """Of each of some sequences of these lengths, alone; of a prefix, too."""
        return self.token * lengths + self.pair * lengths**2 / 2 + self.segment

    def rest_cost(self, lengths: np.ndarray, prefixes: np.ndarray) -> np.ndarray:
        """Of what comes after a shared prefix, for each of some sequences."""
        rests = lengths - prefixes
        return self.token * rests + self.pair * rests * lengths + self.segment


def prefixes_of(samples: list[Sample]) -> Prefixes:
    """The common prefixes of the samples of each prompt, whose tokens are all here."""
    prompts = [sample.prompt_id for sample in samples]
    return find_prefixes(prompts, [token_ids_of(sample) for sample in samples])


def find_prefixes(groups: Sequence[Hashable], sequences: Sequence[np.ndarray]) -> Prefixes:
    """The families of sequences: every sequence is in one. Families are runs of neighbours in
    lexical order, chosen so that their prefixes save the most tokens, or nearly, where one sequence
    is the beginning of another. A sequence has at least one token that is not of the prefix.

    Args:
        groups: of each sequence; a family lies within a group.
        sequences: token ids, int [L] each.
    """
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    prefixes = np.zeros((len(sequences), 2), np.int64)
    families = 0
    for indices in members.values():
        for family, prefix in _best_families(indices, sequences):
            prefixes[family] = (families, prefix)
            families += 1
    return prefixes


def _best_families(
    indices: list[int], sequences: Sequence[np.ndarray]
) -> list[tuple[list[int], int]]:
    """The sequences at `indices`, cut into families, with the prefix of each.

    In lexical order the prefix of a run is the shortest among those of its neighbours. Families
    that are no runs could save more where a long common part lies in the midst of shorter ones.
    """
    # Big-endian bytes sort as the tokens do.
    ordered = sorted(indices, key=lambda i: sequences[i].astype(">u4").tobytes())
    neighbours = itertools.pairwise(ordered)
    common = [_common_length(sequences[a], sequences[b]) for a, b in neighbours]
    return _best_runs(ordered, np.array(common, np.int64))


def _best_runs(ordered: list[int], common: np.ndarray) -> list[tuple[list[int], int]]:
    """See `_best_families`. `common`: the common length of each two neighbours."""
    if len(ordered) > 1 and len(ordered) * common.min() >= common.sum():
        # Any cut would lose at least the shortest common length.
        return [(sorted(ordered), int(common.min()))]
    count = len(ordered)
    best = np.zeros(count + 1, np.int64)  # the most tokens that the first sequences can save
    start_of_last = np.zeros(count + 1, np.int64)
    for end in range(1, count + 1):
        # Of the runs that begin at end - 2, end - 3, ..., 0; the run of one saves nothing.
        shortest = np.minimum.accumulate(common[: end - 1][::-1])
        saved = np.concatenate([[0], shortest * np.arange(1, end)])
        totals = best[:end][::-1] + saved
        longest_run = end - 1 - int(np.argmax(totals[::-1]))  # of equal ones the longest
        best[end] = totals[longest_run]
        start_of_last[end] = end - 1 - longest_run
    families = []
    end = count
    while end:
        start = int(start_of_last[end])
        prefix = int(common[start : end - 1].min()) if end - start > 1 else 0
        families.append((sorted(ordered[start:end]), prefix))
        end = start
    return sorted(families)


def _common_length(first: np.ndarray, second: np.ndarray) -> int:
    """The number of first tokens that two sequences have in common, less than the length of
    either."""
    longest = min(len(first), len(second)) - 1
    differs = first[:longest] != second[:longest]
    return int(np.argmax(differs)) if differs.any() else max(longest, 0)


def families_of(prefixes: Prefixes) -> list[tuple[np.ndarray, int]]:
    """The indices of the sequences of each family, by their first one, and its prefix."""
    members: dict[int, list[int]] = {}
    for index, family in enumerate(prefixes[:, 0].tolist()):
        members.setdefault(family, []).append(index)
    return [(np.array(own), int(prefixes[own[0], 1])) for own in members.values()]


def tokens_saved(rows: Prefixes) -> int:
    """How many tokens less are computed than if each sequence were alone."""
    return sum((len(own) - 1) * prefix for own, prefix in families_of(rows))
