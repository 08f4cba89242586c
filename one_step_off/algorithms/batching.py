"""Cutting a batch into mini-batches, ranks and micro-batches, and laying a micro-batch out for the
model.

Pure numpy. Every rank computes the same plan from the same lengths, so nothing is communicated, and
all ranks run the same number of micro-batches: under FSDP a rank with one forward pass fewer would
leave the others waiting forever.
"""

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from one_step_off.algorithms.shared_prefixes import Prefixes, SharingRule, rows_of

MicroBatchPlan = list[list[list[int]]]
"""plan[rank][micro-batch] = indices of sequences."""

KEYS_PER_TOKEN = 8
"""Each sequence of a shared row has keys and values of all its tokens, which attention keeps. A
micro-batch has at most so many for each token of its budget: short responses to a long prompt would
otherwise need more memory than the plain form."""


def _divide_up(count: int, size: int) -> int:
    """count / size, rounded up."""
    return -(-count // size)


def split_into_mini_batches(
    prompts: Sequence[Hashable], prompts_per_mini_batch: int
) -> list[list[int]]:
    """The positions of the samples of each mini-batch, which holds whole prompt groups.

    `prompts` has the prompt of each sample. Prompts are taken in the order of their first
    appearance; the last mini-batch may have fewer prompts.
    """
    order = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    count = _divide_up(len(order), prompts_per_mini_batch)
    result: list[list[int]] = [[] for _ in range(count)]
    for position, prompt in enumerate(prompts):
        result[order[prompt] // prompts_per_mini_batch].append(position)
    return result


def plan_micro_batches(
    lengths: Sequence[int] | np.ndarray,
    ranks: int,
    token_budget: int,
    packed: bool,
    rounds: int = 1,
    rows: Prefixes | None = None,
) -> MicroBatchPlan:
    """Distribute sequences over ranks and cut each rank's share into micro-batches. Deterministic.

    Ranks are balanced by tokens: longest sequence first, each to the rank with the fewest tokens so
    far. So the numbers of micro-batches hardly differ; empty ones make them equal, and a multiple
    of `rounds`. The cost of a micro-batch stays within `token_budget`, except that a longer
    sequence gets a micro-batch of its own.

    Args:
        lengths: tokens of each sequence, prompt and response together.
        packed: sequences are laid out one after another in one row, which costs the sum of their
            lengths; else they are padded, which costs max_length * rows.
        rounds: with more than 1 (virtual stages) all micro-batches are padded to one shape, see
            `pad_to_same_shape`, so each sequence costs as much as the longest.
        rows: of `rows_that_pay`. The sequences of one row are in one micro-batch, and cost what
            they have together. None: each sequence is alone.
    """
    tokens = [int(length) for length in lengths]
    if rows is not None and rows[:, 1].any():
        balanced = _balanced_rows(tokens, rows, ranks)
        plan = [_cut_rows(share, tokens, rows, token_budget, packed) for share in balanced]
    else:
        shares = _balance(tokens, ranks)
        costs = tokens if rounds == 1 else [max(tokens, default=0)] * len(tokens)
        plan = [_cut(share, costs, token_budget, packed) for share in shares]
    most = max(len(micro_batches) for micro_batches in plan)
    count = _divide_up(most, rounds) * rounds
    for micro_batches in plan:
        micro_batches += [[] for _ in range(count - len(micro_batches))]
    return plan


def padded_lengths(lengths: Sequence[int], multiple: int) -> list[int]:
    """Each length rounded up to a multiple, as it is laid out."""
    return [_divide_up(int(length), multiple) * multiple for length in lengths]


def positions_of_shares(
    lengths: Sequence[int],
    mini_batches: list[list[int]],
    shares: int,
    multiple: int,
    prefixes: Prefixes | None = None,
    rule: SharingRule | None = None,
) -> list[list[int]]:
    """Per share the positions in the batch of all samples that `plan_micro_batches` gives it, in
    ascending order.

    Args:
        lengths: tokens of each sample of the batch.
        mini_batches: positions of the samples that are planned together.
        shares: into how many the batch is divided.
        multiple: see `padded_lengths`.
        prefixes: of all samples; None: the ranks share none.
        rule: by which they are shared.
    """
    padded = padded_lengths(lengths, multiple)
    positions: list[list[int]] = [[] for _ in range(shares)]
    for mini_batch in mini_batches:
        tokens = [padded[position] for position in mini_batch]
        rows = np.column_stack([np.arange(len(tokens)), np.zeros(len(tokens), np.int64)])
        if prefixes is not None and rule is not None:
            rows = rows_that_pay(tokens, prefixes[mini_batch], rule, shares)
        for share, own_rows in enumerate(_balanced_rows(tokens, rows, shares)):
            positions[share] += [mini_batch[index] for row in own_rows for index in row]
    return [sorted(own) for own in positions]


def _balance(tokens: list[int], ranks: int) -> list[list[int]]:
    """The indices of the sequences of each rank, longest first."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    # (tokens, sequences, rank): the first of the heap is the rank with the fewest so far.
    heap = [(0, 0, rank) for rank in range(ranks)]
    for i in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        rank_tokens, count, rank = heap[0]
        shares[rank].append(i)
        heapq.heapreplace(heap, (rank_tokens + tokens[i], count + 1, rank))
    return shares


def _balanced_rows(tokens: list[int], rows: Prefixes, ranks: int) -> list[list[np.ndarray]]:
    """The rows of each rank, those with the most tokens first, as the indices of their sequences;
    see `_balance`."""
    every = rows_of(rows)
    costs = [sum(tokens[i] - int(rows[i, 1]) for i in row) for row in every]
    return [[every[i] for i in share] for share in _balance(costs, ranks)]


def _row_size(row: np.ndarray, rows: Prefixes, tokens: list[int]) -> int:
    """What a row takes of a micro-batch: its tokens, or more where it has very many keys."""
    keys = sum(tokens[i] for i in row)
    return max(keys - int(rows[row, 1].sum()), _divide_up(keys, KEYS_PER_TOKEN))


def _cut_rows(
    share: list[np.ndarray], tokens: list[int], rows: Prefixes, budget: int, packed: bool
) -> list[list[int]]:
    """As `_cut`, of a share's rows. A shared row is never padded: where others are, shared rows
    have micro-batches of their own."""
    costs = [_row_size(row, rows, tokens) for row in share]
    numbers = list(range(len(share)))
    if packed:
        cut = _first_fit(numbers, costs, budget)
    else:
        cut = _first_fit([i for i in numbers if len(share[i]) > 1], costs, budget)
        cut += _cut_padded([i for i in numbers if len(share[i]) == 1], costs, budget)
    return [[int(index) for i in micro_batch for index in share[i]] for micro_batch in cut]


def _cut(share: list[int], lengths: list[int], budget: int, packed: bool) -> list[list[int]]:
    """Cut one rank's share, which comes longest first, into micro-batches."""
    if packed:
        return _first_fit(share, lengths, budget)
    return _cut_padded(share, lengths, budget)


def _first_fit(share: list[int], lengths: list[int], budget: int) -> list[list[int]]:
    """First-fit decreasing: at most 11/9 of the fewest possible micro-batches plus one."""
    micro_batches: list[list[int]] = []
    free_tokens: list[int] = []
    for i in share:
        for k, free in enumerate(free_tokens):
            if free >= lengths[i]:
                micro_batches[k].append(i)
                free_tokens[k] -= lengths[i]
                break
        else:
            micro_batches.append([i])
            free_tokens.append(budget - lengths[i])
    return micro_batches


def _cut_padded(share: list[int], lengths: list[int], budget: int) -> list[list[int]]:
    """Sequences of similar length share a micro-batch; its first one, the longest, sets the
    width.
    """
    micro_batches: list[list[int]] = []
    for i in share:
        if micro_batches:
            newest = micro_batches[-1]
            width = lengths[newest[0]]
            if (len(newest) + 1) * width <= budget:
                newest.append(i)
                continue
        micro_batches.append([i])
    return micro_batches


def rows_that_pay(
    lengths: Sequence[int] | np.ndarray, prefixes: Prefixes, rule: SharingRule, shares: int
) -> Prefixes:
    """The rows in which sequences should be laid out, so that what they share is cut where sharing
    does not pay. A sequence continues the one before it where that saves enough of its cost; a row
    is shared where it saves enough in all, and fits.

    A row is computed by one rank. With long rows the ranks may have unequal work, so rows of all
    sequences that fit are tried, of half as many, a quarter and so on; the choice is what leaves
    the slowest rank the least work.

    Args:
        lengths: tokens of each sequence.
        prefixes: of `find_prefixes`.
        rule: see there.
        shares: over how many ranks the rows will be divided.
    """
    tokens = np.asarray(lengths, np.int64)
    order, ordered, common = _sequences_that_pay(tokens, prefixes, rule)

    def rows_of_up_to(most: int) -> Prefixes:
        rows = np.zeros((len(tokens), 2), np.int64)
        rows[order, 0] = np.arange(len(tokens))
        rows[order, 1] = _cut_into_rows(ordered, common, rule, most)
        return rows

    most = int(np.diff(np.flatnonzero(np.append(common, 0) == 0)).max(initial=0))
    if shares == 1:
        return rows_of_up_to(most)
    chosen = np.column_stack([np.arange(len(tokens)), np.zeros(len(tokens), np.int64)])
    least = _work_of_slowest(tokens, chosen, rule, shares)
    while most > 1:
        rows = rows_of_up_to(most)
        if not rows[:, 1].any():
            break  # and smaller ones would pay less
        work = _work_of_slowest(tokens, rows, rule, shares)
        if work < least:
            chosen, least = rows, work
        most = _divide_up(most, 2)
    return chosen


def _sequences_that_pay(
    tokens: np.ndarray, prefixes: Prefixes, rule: SharingRule
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The indices of sequences in the order of `prefixes`, their lengths, and what each should have
    in common with the one before it, int64 [B] each. Those that are too long for a row come last,
    alone."""
    order = np.argsort(prefixes[:, 0])
    fits = tokens[order] <= rule.row_tokens
    if not fits.any():
        return order, tokens[order], np.zeros(len(order), np.int64)
    # Where some are taken out between two sequences, these have the least of it in common.
    places = np.flatnonzero(fits)
    begins = np.concatenate([[0], places[:-1] + 1])
    common = np.minimum.reduceat(prefixes[order[: places[-1] + 1], 1], begins)
    lengths = tokens[order[fits]]
    alone = rule.cost(lengths)
    pays = alone - rule.cost(lengths, common) >= rule.least_gain * alone
    order = np.concatenate([order[fits], order[~fits]])
    return order, tokens[order], np.pad(common * pays, (0, len(order) - len(common)))


def _cut_into_rows(
    lengths: np.ndarray, common: np.ndarray, rule: SharingRule, most: int
) -> np.ndarray:
    """What sequences, in order, have in common with those before them in rows of up to `most`
    sequences and of a size (`_row_size`) of up to `rule.row_tokens`. Rows that do not pay are
    plain."""
    row_of = np.cumsum(common == 0) - 1
    counts = np.bincount(row_of)
    begins = np.cumsum(counts) - counts
    keys = np.bincount(row_of, lengths)
    size = np.maximum(keys - np.bincount(row_of, common), keys / KEYS_PER_TOKEN)
    is_cut = (counts > 1) & ((size > rule.row_tokens) | (counts > most))
    common = common.copy()
    if is_cut.any():
        columns = np.arange(counts[is_cut].max())
        is_there = columns < counts[is_cut, None]
        # Beyond a row the first sequence stands in, which has none before it.
        places = np.where(is_there, begins[is_cut, None] + columns, 0)
        own_lengths = lengths[places] * is_there
        begins_part = _cheapest_cuts(own_lengths, common[places], rule.row_tokens, most)
        common[places[begins_part]] = 0
    row_of = np.cumsum(common == 0) - 1
    saved = np.bincount(row_of, rule.cost(lengths) - rule.cost(lengths, common))
    return np.where(saved[row_of] >= rule.least_saving, common, 0)


def _cheapest_cuts(
    lengths: np.ndarray, common: np.ndarray, row_tokens: int, most: int
) -> np.ndarray:
    """Where rows should be cut so that the parts fit and have the fewest tokens. Each sequence
    alone fits.

    Args:
        lengths, common: int64 [rows, n]; shorter rows end with zeros.

    Returns:
        bool [rows, n], the first sequence of each part.
    """
    rows, count = lengths.shape
    every_row = np.arange(rows)
    keys = np.pad(np.cumsum(lengths, 1), ((0, 0), (1, 0)))
    saved = np.pad(np.cumsum(common, 1), ((0, 0), (1, 0)))
    lost = np.zeros((rows, count + 1))  # tokens that the parts of the first sequences repeat
    begin_of_last = np.zeros((rows, count + 1), np.int64)
    for end in range(1, count + 1):
        first = max(0, end - most)
        part_keys = keys[:, [end]] - keys[:, first:end]
        tokens = part_keys - (saved[:, [end]] - saved[:, first + 1 : end + 1])
        fits = np.maximum(tokens, part_keys / KEYS_PER_TOKEN) <= row_tokens
        totals = np.where(fits, lost[:, first:end] + common[:, first:end], np.inf)
        best = np.argmin(totals, 1)  # of equal ones the longest part
        lost[:, end] = totals[every_row, best]
        begin_of_last[:, end] = first + best
    begins_part = np.zeros((rows, count), bool)
    begin = np.full(rows, count)
    while begin.any():
        begin = begin_of_last[every_row, begin]
        begins_part[every_row, begin] = True
    return begins_part


def _work_of_slowest(tokens: np.ndarray, rows: Prefixes, rule: SharingRule, shares: int) -> float:
    """The largest cost of a rank's rows."""
    order = np.argsort(rows[:, 0])
    lengths, common = tokens[order], rows[order, 1]
    row_of = np.cumsum(common == 0) - 1
    work = np.bincount(row_of, rule.cost(lengths, common))
    row_tokens = np.bincount(row_of, lengths - common).astype(np.int64)
    balanced = _balance(row_tokens.tolist(), shares)
    return max(float(work[share].sum()) for share in balanced)


@dataclass
class MicroBatch:
    """A micro-batch as the model takes it.

    Attributes:
        input_ids: int64 [rows, width]; padded on the right with 0, or packed into one row.
        position_ids: int64 [1, width] that restart at each sequence when packed, else None. A
            padded batch needs neither positions nor a mask: under causal attention no real token
            sees the padding to its right.
        cu_seqlens: int32 [sequences + 1], the first token of each packed sequence and their number
            of tokens; None when padded. Attention must not cross these boundaries.
        max_seqlen: tokens of the longest packed sequence; 0 when padded.
        common: where prefixes are shared, how many first tokens of each packed sequence are those
            of the one before it: int64 [sequences]. They are not repeated, and `cu_seqlens`,
            `max_seqlen` are of what is left. None: nothing is shared.
        uses: where prefixes are shared, of how many sequences each position is a token: int64
            [width].
        experts: int16 [rows * width, layers, experts per token], which the routers take for each
            token; -1: they choose themselves. None: they do so everywhere.
        logit_index: int64 [n]; flat index into [rows * width] of the position whose logits predict
            each wanted token.
        tokens: int64 [n]; the wanted tokens.
        counts: wanted tokens of each sequence, in the order of the sequences; sums to n.
        images: the encoded images of all sequences, in the order of their tokens.
        is_sampled: whether an engine may have sampled the wanted tokens, so that those that it must
            not sample have no probability.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray | None
    logit_index: np.ndarray
    tokens: np.ndarray
    counts: list[int]
    cu_seqlens: np.ndarray | None = None
    max_seqlen: int = 0
    common: np.ndarray | None = None
    uses: np.ndarray | None = None
    experts: np.ndarray | None = None
    images: list[bytes] = field(default_factory=list)
    is_sampled: bool = True

    def grid_of_experts(self) -> np.ndarray:
        """`experts` as [rows, width, layers, experts per token]; there are some."""
        assert self.experts is not None
        return self.experts.reshape(*self.input_ids.shape, *self.experts.shape[1:])

    def keys(self) -> list[np.ndarray]:
        """Of each sequence of a row with shared prefixes the positions of all its tokens, which are
        the keys of its attention, int64 [L] each."""
        assert self.cu_seqlens is not None and self.common is not None
        result = []
        last = np.zeros(0, np.int64)
        own_positions = np.split(np.arange(self.cu_seqlens[-1]), self.cu_seqlens[1:-1])
        for own, common in zip(own_positions, self.common, strict=True):
            last = np.concatenate([last[:common], own])
            result.append(last)
        return result


def collate(
    sequences: list[np.ndarray],
    wanted: list[np.ndarray],
    packed: bool,
    multiple: int = 1,
    experts: Sequence[np.ndarray | None] = (),
    rows: Prefixes | None = None,
) -> MicroBatch:
    """Lay sequences out for the model.

    An empty micro-batch becomes two tokens of which none is wanted: it takes part in every
    collective of the forward and backward pass and adds nothing.

    Args:
        sequences: token ids, one array [L_i] each.
        wanted: for each sequence the positions (1 to L_i - 1) of the tokens whose log-prob is
            wanted.
        packed: one row without padding, else one row per sequence.
        multiple: the width of the rows is rounded up to a multiple of it.
        experts: of each sequence those of its first tokens, [tokens, layers, experts per token];
            None: not known.
        rows: of `rows_that_pay`, of these sequences. With a shared prefix all are packed, whatever
            `packed` is.

    Raises:
        ValueError: the first token of a sequence is wanted; or a row with a shared prefix would be
            divided, as `multiple` above 1 says.
    """
    sequences = sequences or [np.zeros(2, dtype=np.int64)]
    wanted = wanted or [np.zeros(0, dtype=np.int64)]
    if any(len(positions) and positions[0] < 1 for positions in wanted):
        raise ValueError("the first token of a sequence has no log-prob: nothing stands before it")
    if rows is not None and rows[:, 1].any():
        if multiple > 1:
            raise ValueError("ranks that divide rows share no prefixes")
        return _collate_shared(sequences, wanted, rows)
    position_ids = None
    cu_seqlens = None
    max_seqlen = 0
    if packed:
        lengths = _packed_lengths(sequences, multiple)
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        max_seqlen = max(lengths)
        starts = cu_seqlens[: len(sequences)]
        tail = np.zeros(sum(lengths[len(sequences) :]), dtype=np.int64)
        input_ids = np.concatenate([*sequences, tail]).astype(np.int64)[None]
        position_ids = np.concatenate([np.arange(length) for length in lengths])[None]
    else:
        width = _divide_up(max(map(len, sequences)), multiple) * multiple
        starts = np.arange(len(sequences)) * width
        rows = [np.pad(sequence, (0, width - len(sequence))) for sequence in sequences]
        input_ids = np.stack(rows).astype(np.int64)
    # The logits at position p predict the token at p + 1.
    logit_parts = [p + start - 1 for p, start in zip(wanted, starts, strict=True)]
    token_parts = [sequence[p] for sequence, p in zip(sequences, wanted, strict=True)]
    return MicroBatch(
        input_ids,
        position_ids,
        logit_index=np.concatenate(logit_parts).astype(np.int64),
        tokens=np.concatenate(token_parts).astype(np.int64),
        counts=[len(positions) for positions in wanted],
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        experts=_laid_out_experts(experts, starts, input_ids.size),
    )


def _collate_shared(
    sequences: list[np.ndarray], wanted: list[np.ndarray], rows: Prefixes
) -> MicroBatch:
    """As `collate`, each sequence without what it has in common with the one before it. Raises
    ValueError: one shares more tokens than the one before it has."""
    order = np.argsort(rows[:, 0])
    common = rows[order, 1]
    available = [0, *(len(sequences[i]) for i in order[:-1])]
    if np.any(common > available):
        raise ValueError(f"rows {rows[order].tolist()} share more than {available} tokens")
    parts = [sequences[i][first:] for i, first in zip(order, common, strict=True)]
    positions = [np.arange(first, first + len(p)) for p, first in zip(parts, common, strict=True)]
    lengths = [len(part) for part in parts]
    token_parts = [sequence[p] for sequence, p in zip(sequences, wanted, strict=True)]
    micro = MicroBatch(
        np.concatenate(parts).astype(np.int64)[None],
        np.concatenate(positions)[None],
        logit_index=np.zeros(0, np.int64),
        tokens=np.concatenate(token_parts).astype(np.int64),
        counts=[len(own) for own in wanted],
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        max_seqlen=max(lengths),
        common=common,
    )
    keys = micro.keys()
    micro.uses = np.bincount(np.concatenate(keys))
    # The logits at position p predict the token at p + 1, also where another sequence has p.
    logit_parts = [keys[place][wanted[i] - 1] for place, i in enumerate(order)]
    micro.logit_index = np.concatenate([logit_parts[place] for place in np.argsort(order)])
    return micro


def _laid_out_experts(
    experts: Sequence[np.ndarray | None], starts: np.ndarray, positions: int
) -> np.ndarray | None:
    """`MicroBatch.experts`. `starts`: the first position of each sequence."""
    known = [own for own in experts if own is not None]
    if not known:
        return None
    laid_out = np.full((positions, *known[0].shape[1:]), -1, np.int16)
    for own, start in zip(experts, starts, strict=True):
        if own is not None:
            laid_out[start : start + len(own)] = own
    return laid_out


def _packed_lengths(sequences: list[np.ndarray], multiple: int) -> list[int]:
    """Tokens of each sequence of a packed row; one more, of which nothing is wanted, fills the row
    up to a multiple of `multiple`."""
    lengths = [len(sequence) for sequence in sequences]
    missing = -sum(lengths) % multiple
    return [*lengths, missing] if missing else lengths


def pad_to_same_shape(micro_batches: Sequence[MicroBatch]) -> tuple[int, int]:
    """Pad padded micro-batches, in place, to the most rows and the largest width among them.

    Returns these rows and width.
    """
    rows = max(micro.input_ids.shape[0] for micro in micro_batches)
    width = max(micro.input_ids.shape[1] for micro in micro_batches)
    for micro in micro_batches:
        old_rows, old_width = micro.input_ids.shape
        padding = ((0, rows - old_rows), (0, width - old_width))
        if micro.experts is not None:
            padded = np.pad(micro.grid_of_experts(), (*padding, (0, 0), (0, 0)), constant_values=-1)
            micro.experts = padded.reshape(-1, *padded.shape[2:])
        micro.input_ids = np.pad(micro.input_ids, padding)
        row = micro.logit_index // old_width
        column = micro.logit_index % old_width
        micro.logit_index = row * width + column
    return rows, width


def context_parallel_columns(width: int, rank: int, ranks: int) -> np.ndarray:
    """The columns of one of `ranks` context-parallel ranks, int64.

    Of 2 * ranks blocks it has one and its mirror image, so that under causal attention all ranks do
    the same amount of work. With several ranks the blocks must be of equal size.
    """
    blocks = np.array_split(np.arange(width), 2 * ranks)
    return np.concatenate([blocks[rank], blocks[-1 - rank]])


def context_parallel_slice(
    micro: MicroBatch, rank: int, ranks: int
) -> tuple[MicroBatch, np.ndarray]:
    """One context-parallel rank's columns of a padded micro-batch.

    Returns:
        That part of the micro-batch, and the indices of its wanted tokens among all, int64.
    """
    return _slice(micro, context_parallel_columns(micro.input_ids.shape[1], rank, ranks))


def sequence_parallel_columns(width: int, rank: int, ranks: int) -> np.ndarray:
    """The columns of one of `ranks` sequence-parallel ranks, int64: neighbours, as many on each,
    since `ranks` divides the width."""
    return np.arange(width).reshape(ranks, -1)[rank]


def sequence_parallel_slice(
    micro: MicroBatch, rank: int, ranks: int
) -> tuple[MicroBatch, np.ndarray]:
    """As `context_parallel_slice`, one sequence-parallel rank's columns of a packed micro-batch.
    Positions and boundaries stay those of the whole row."""
    return _slice(micro, sequence_parallel_columns(micro.input_ids.shape[1], rank, ranks))


def _slice(micro: MicroBatch, own_columns: np.ndarray) -> tuple[MicroBatch, np.ndarray]:
    """Some columns of a micro-batch, and the indices of their wanted tokens among all."""
    width = micro.input_ids.shape[1]
    new_column = np.full(width, -1)  # of a column, in the slice; -1: another rank has it
    new_column[own_columns] = np.arange(len(own_columns))
    row = micro.logit_index // width
    column = new_column[micro.logit_index % width]
    own_tokens = np.flatnonzero(column >= 0)
    part = replace(
        micro,
        input_ids=micro.input_ids[:, own_columns],
        logit_index=(row * len(own_columns) + column)[own_tokens],
        tokens=micro.tokens[own_tokens],
        counts=[],
    )
    if micro.position_ids is not None:
        part.position_ids = micro.position_ids[:, own_columns]
    if micro.experts is not None:
        own_experts = micro.grid_of_experts()[:, own_columns]
        part.experts = own_experts.reshape(-1, *own_experts.shape[2:])
    return part, own_tokens
