"""Cutting a batch into mini-batches, ranks and micro-batches, and laying a micro-batch out for the model.

Pure numpy. Every rank computes the same plan from the same lengths, so nothing is communicated, and all run the same
number of micro-batches: under FSDP a rank with one forward pass fewer would leave the others waiting for ever.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

MicroBatchPlan = list[list[list[int]]]
"""plan[rank][micro-batch] = indices of sequences."""


def split_into_mini_batches(
    prompts: Sequence[Hashable], prompts_per_mini_batch: int
) -> list[list[int]]:
    """Positions of samples, one list per mini-batch of whole prompt groups, prompts in order of first appearance;
    `prompts` has the prompt of each sample. The last mini-batch may have fewer prompts."""
    order = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    result: list[list[int]] = [[] for _ in range(-(-len(order) // prompts_per_mini_batch))]
    for position, prompt in enumerate(prompts):
        result[order[prompt] // prompts_per_mini_batch].append(position)
    return result


def plan_micro_batches(
    lengths: Sequence[int] | np.ndarray,
    ranks: int,
    token_budget: int,
    packed: bool,
    rounds: int = 1,
) -> MicroBatchPlan:
    """Share sequences over ranks and cut each share into micro-batches. Deterministic.

    Ranks are balanced by tokens: longest first, each to the rank with the fewest tokens so far. So their micro-batch
    counts hardly differ; empty ones make them equal, and a multiple of `rounds`. A micro-batch costs max_length * rows
    when padded, and the sum of lengths when `packed` (one after the other). The cost stays within `token_budget`,
    except that a longer sequence has a micro-batch of its own. `lengths` are the tokens of each sequence, prompt and
    response together. With `rounds` above 1 (virtual stages) all micro-batches are padded alike, see `same_shape`, so
    each sequence costs as much as the longest.
    """
    n = [int(x) for x in lengths]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for i in sorted(range(len(n)), key=lambda i: (-n[i], i)):
        rank = min(range(ranks), key=lambda rank: (tokens[rank], len(shares[rank])))
        shares[rank].append(i)
        tokens[rank] += n[i]
    sizes = n if rounds == 1 else [max(n, default=0)] * len(n)
    result = [_cut(share, sizes, token_budget, packed) for share in shares]
    count = -(-max(len(micros) for micros in result) // rounds) * rounds
    return [micros + [[] for _ in range(count - len(micros))] for micros in result]


def _cut(share: list[int], lengths: list[int], budget: int, packed: bool) -> list[list[int]]:
    """Packed: first-fit decreasing, at most 11/9 of the fewest possible micro-batches plus one. Padded: neighbours in
    length share a micro-batch; `share` comes longest first, so its first row sets the cost of each."""
    micros: list[list[int]] = []
    room: list[int] = []
    for i in share:
        tried = range(len(micros)) if packed else range(len(micros))[-1:]
        k = next(
            (k for k in tried if room[k] >= lengths[i if packed else micros[k][0]]), len(micros)
        )
        if k == len(micros):
            micros.append([])
            room.append(budget)
        micros[k].append(i)
        room[k] -= lengths[i if packed else micros[k][0]]
    return micros


@dataclass
class MicroBatch:
    """A micro-batch as the model takes it.

    Attributes:
        input_ids: int64 [rows, width]; padded on the right with 0, or packed into one row.
        position_ids: int64 [1, width] that restart at each sequence when packed, else None. A padded batch needs
            neither positions nor a mask: under causal attention no real token sees the padding to its right.
        at: int64 [n]; flat index into [rows * width] of the position whose logits predict each wanted token.
        tokens: int64 [n]; the wanted tokens.
        counts: wanted tokens of each sequence, in the order of the sequences; sums to n.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray | None
    logit_index: np.ndarray
    tokens: np.ndarray
    counts: list[int]


def collate(
    sequences: list[np.ndarray], wanted: list[np.ndarray], packed: bool, multiple: int = 1
) -> MicroBatch:
    """Lay sequences out for the model.

    An empty micro-batch becomes two tokens with nothing wanted: it takes part in every collective of the
    forward and backward pass and adds nothing.

    Args:
        sequences: token ids, one array [L_i] each.
        wanted: for each sequence the places (1 .. L_i - 1) of the tokens whose log-prob is asked for.
        packed: one row without padding, else one row per sequence.
        multiple: the width of padded rows is rounded up to a multiple of it.
    """
    sequences = sequences or [np.zeros(2, dtype=np.int64)]
    wanted = wanted or [np.zeros(0, dtype=np.int64)]
    if any(len(w) and w[0] < 1 for w in wanted):
        raise ValueError("the first token of a sequence has no log-prob: nothing stands before it")
    lengths = [len(s) for s in sequences]
    if packed:
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        input_ids = np.concatenate(sequences).astype(np.int64)[None]
        position_ids = np.concatenate([np.arange(n) for n in lengths])[None]
    else:
        width = -(-max(lengths) // multiple) * multiple
        starts = np.arange(len(sequences)) * width
        rows = [np.pad(s, (0, width - len(s))) for s in sequences]
        input_ids, position_ids = np.stack(rows).astype(np.int64), None
    at = np.concatenate([w + start - 1 for w, start in zip(wanted, starts, strict=True)]).astype(
        np.int64
    )
    tokens = np.concatenate([s[w] for s, w in zip(sequences, wanted, strict=True)]).astype(np.int64)
    return MicroBatch(input_ids, position_ids, at, tokens, [len(w) for w in wanted])


def pad_to_same_shape(laid: Sequence[MicroBatch]) -> tuple[int, int]:
    """Pad padded micro-batches, in place, to the most rows and the largest width among them; returns the two."""
    rows, width = (max(m.input_ids.shape[axis] for m in laid) for axis in (0, 1))
    for micro in laid:
        had = micro.input_ids.shape
        micro.input_ids = np.pad(micro.input_ids, ((0, rows - had[0]), (0, width - had[1])))
        micro.logit_index = micro.logit_index // had[1] * width + micro.logit_index % had[1]
    return rows, width


def context_parallel_columns(width: int, rank: int, ranks: int) -> np.ndarray:
    """The columns that one of `ranks` context-parallel ranks has: of 2 * `ranks` blocks one, and its mirror image, so that
    all attend to as much. The blocks must be equal where there are several ranks."""
    blocks = np.array_split(np.arange(width), 2 * ranks)
    return np.concatenate([blocks[rank], blocks[-1 - rank]])


def context_parallel_slice(
    laid: MicroBatch, rank: int, ranks: int
) -> tuple[MicroBatch, np.ndarray]:
    """What that rank has of a padded micro-batch, and which of the wanted tokens."""
    width = laid.input_ids.shape[1]
    own, place = context_parallel_columns(width, rank, ranks), np.full(width, -1)
    place[own] = np.arange(len(own))
    row, column = laid.logit_index // width, place[laid.logit_index % width]
    mine = np.flatnonzero(column >= 0)
    at = (row * len(own) + column)[mine]
    return MicroBatch(laid.input_ids[:, own], None, at, laid.tokens[mine], []), mine
