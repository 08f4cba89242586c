"""What changed between two states of a weight bucket, exactly and in few bytes.

A bucket is read as 16-bit words. What changed is stored as two columns of small numbers: gaps
between changed words, and differences of their bit patterns mod 2^16, folded to 0, 1, 2, ... for 0,
-1, 1, ... (zigzag coding). After an optimizer step at a learning rate of RL most bf16 weights stay
the same and the others move to a neighboring value, so both columns mostly fit one byte per number.

A payload holds, in this order:

1. the number of words in the bucket and in a block (int32);
2. for each block the lengths of its six streams (int32);
3. all int32 streams, all 16-bit streams, all 8-bit streams;
4. zeros up to a multiple of 16 bytes.

A number that does not fit a stream is stored there as the stream's largest value, and in full in
the next wider stream. A column starts in the 16-bit stream if half of it would not fit the 8-bit
one.
"""

from collections.abc import Callable

import torch

from one_step_off.weight_sync import delta
from one_step_off.weight_sync.bucket_plan import BucketPlan, Parts

# Words per block: few enough for small temporaries, enough to hide the fixed cost of an operation.
_BLOCK_WORDS = {"cpu": 1 << 21, "cuda": 1 << 23}
_COUNTS_FIRST = {"cpu": False, "cuda": True}
"""By device type: whether all counts of a payload are found first, and read together. Each read
makes the host wait for a GPU; on CPUs finding them takes longer than it saves."""
_STREAM_DTYPES = (torch.int32, torch.int16, torch.uint8)
_STREAMS_PER_BLOCK = 2 * len(_STREAM_DTYPES)
_HEADER_BYTES = 8
_ALIGNMENT = 16
_MAX_WORDS = 2**31  # the header's numbers are int32
_MAX_BYTE = 0xFF
_MAX_WORD = 0xFFFF

Streams = list[torch.Tensor]
"""The three streams of one column, in the order of _STREAM_DTYPES."""


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def encode(new: torch.Tensor, base: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """The payload that turns `base` into `new`, and the number of words that differ.

    The largest temporaries, beside the payload's streams, take about 40 bytes for each word of a
    block.

    Args:
        new: uint8 [n], n a multiple of 16.
        base: uint8 [n], on the same device.

    Returns:
        The payload, uint8 [m] with m a multiple of 16, on the tensors' device; None if it would
        have n bytes or more, so that sending all of `new` is cheaper. And the number of changed
        words.
    """
    new_words = new.view(torch.int16)
    base_words = base.view(torch.int16)
    block_words = _BLOCK_WORDS[new.device.type]
    blocks = list(zip(new_words.split(block_words), base_words.split(block_words), strict=True))
    columns: list[torch.Tensor] = []
    for (new_block, base_block), counts in zip(blocks, _read(_count_changes, blocks), strict=True):
        columns += _changes(new_block, base_block, *counts)
    changed = sum(map(len, columns[::2]))
    streams: Streams = []
    of_columns = _read(_count_wide, [(column,) for column in columns])
    for column, counts in zip(columns, of_columns, strict=True):
        streams += _split(column, *counts)
    stream_bytes = sum(stream.nbytes for stream in streams)
    size = _align(_HEADER_BYTES + 4 * len(streams) + stream_bytes)
    if size >= len(new) or len(new_words) >= _MAX_WORDS:
        return None, changed
    numbers = [len(new_words), block_words, *map(len, streams)]
    # Pinned on GPUs: the host would wait for a copy from other memory.
    header = torch.tensor(numbers, dtype=torch.int32, pin_memory=new.is_cuda)
    header = header.to(new.device, non_blocking=True)
    widest_first = sorted(streams, key=lambda stream: -stream.itemsize)
    padding = new.new_zeros(_ALIGNMENT)
    payload = torch.cat([part.view(torch.uint8) for part in [header, *widest_first, padding]])
    return payload[:size], changed


def _read(
    count: Callable[..., list[torch.Tensor]], arguments: list[tuple[torch.Tensor, ...]]
) -> list[list]:
    """What `count` finds for each of these arguments, as numbers; [None, None] where _COUNTS_FIRST
    is False."""
    if not arguments or not _COUNTS_FIRST[arguments[0][0].device.type]:
        return [[None, None]] * len(arguments)
    found = [number for one in arguments for number in count(*one)]
    return torch.stack(found).view(-1, 2).tolist()


def _count_changes(new: torch.Tensor, old: torch.Tensor) -> list[torch.Tensor]:
    """How many rows and how many words differ."""
    differs = new.view(torch.int64) != old.view(torch.int64)
    _, row_dtype = _rows_of(new)
    return [differs.view(row_dtype).count_nonzero(), (new != old).count_nonzero()]


def _count_wide(column: torch.Tensor) -> list[torch.Tensor]:
    """How many numbers of a column do not fit the 8-bit, and the 16-bit stream."""
    return [(column >= _MAX_BYTE).count_nonzero(), (column >= _MAX_WORD).count_nonzero()]


def _nonzero(values: torch.Tensor, count: int | None) -> torch.Tensor:
    """The positions that are not zero, int64 [count]. None: the host must find the count."""
    if count is None:
        return values.nonzero().flatten()
    return torch.nonzero_static(values, size=count).flatten()


def _rows_of(block: torch.Tensor) -> tuple[int, torch.dtype]:
    """Words in a row of a block (int16 [k]), as a power of two; and the dtype that holds the
    comparison of its int64 numbers.

    A row has 64 bytes if the block divides into such.
    """
    if len(block) % 32:
        return 3, torch.int16  # a row is compared as 2 int64
    return 5, torch.int64  # as 8


def _changes(
    new: torch.Tensor, old: torch.Tensor, row_count: int | None, word_count: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gaps and folded differences (int32 [c] each) of the words (int16 [k]) that differ; the counts
    as `_count_changes` finds them.

    It looks for rows of words first: finding single words costs much more than comparing.
    """
    row_shift, row_dtype = _rows_of(new)
    int64_per_row = (1 << row_shift) // 4
    differs = new.view(torch.int64) != old.view(torch.int64)
    rows = _nonzero(differs.view(row_dtype), row_count)
    new_rows = new.view(torch.int64).view(-1, int64_per_row).index_select(0, rows)
    old_rows = old.view(torch.int64).view(-1, int64_per_row).index_select(0, rows)
    differences = (new_rows.view(torch.int16) - old_rows.view(torch.int16)).flatten()
    index_in_rows = _nonzero(differences, word_count)
    steps = differences.index_select(0, index_in_rows).int()
    row_starts = (rows << row_shift).index_select(0, index_in_rows >> row_shift)
    positions = (row_starts + (index_in_rows & (1 << row_shift) - 1)).int()
    gaps = torch.diff(positions, prepend=positions.new_full((1,), -1)) - 1
    folded_steps = ((steps << 1) ^ (steps >> 15)) & _MAX_WORD
    return gaps, folded_steps


def _split(column: torch.Tensor, wide_count: int | None, widest_count: int | None) -> Streams:
    """The streams of a column (int32 [c], none negative); the counts as `_count_wide` finds
    them."""
    narrow = column
    wide = column.index_select(0, _nonzero(column >= _MAX_BYTE, wide_count))
    if 2 * len(wide) >= len(column):
        narrow = column[:0]
        wide = column
    return [
        wide.index_select(0, _nonzero(wide >= _MAX_WORD, widest_count)),
        wide.clamp(max=_MAX_WORD).to(torch.int16),
        narrow.clamp(max=_MAX_BYTE).to(torch.uint8),
    ]


def apply(payload: torch.Tensor, words: torch.Tensor) -> None:
    """Turn `words` from the base of `payload` into its new state, in place.

    A wrong base, or damage that leaves a valid payload, is not detected: compare checksums.

    Args:
        payload: uint8 [m], of `encode`.
        words: uint8 [n], the base.

    Raises:
        ValueError: the payload belongs to another size, or contradicts itself. `words` is unchanged
            then.
    """
    faults: list[torch.Tensor] = []
    decoded = []
    for block, gaps, steps in _parse(payload, words.view(torch.int16)):
        positions, differences = _decode(gaps, steps, len(block), faults)
        decoded.append((block, positions, differences))
    # One read for all blocks, before anything is written.
    if faults and bool(torch.stack(faults).any()):
        raise ValueError("delta: its streams do not fit together, or positions not within a block")
    for block, positions, differences in decoded:
        block.scatter_(0, positions, block.index_select(0, positions) + differences)


def _decode(
    gaps: Streams, steps: Streams, block_words: int, faults: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions (int64 [c]) and differences (int16 [c]) of a block's changes. Adds to `faults` what
    must not be true.

    Raises:
        ValueError: the columns have different lengths.
    """
    positions = (_join(gaps, faults).long() + 1).cumsum(0) - 1
    folded_steps = _join(steps, faults)
    if len(positions) != len(folded_steps):
        raise ValueError("delta: as many positions as differences must be within a block")
    first, last = positions.aminmax()
    faults += [first < 0, last >= block_words]
    differences = ((folded_steps >> 1) ^ -(folded_steps & 1)).to(torch.int16)
    return positions, differences


def _parse(
    payload: torch.Tensor, words: torch.Tensor
) -> list[tuple[torch.Tensor, Streams, Streams]]:
    """Each block of `words` (int16 [k]) that has changes, with the streams of its gaps and of its
    steps.

    Raises:
        ValueError: the header does not fit the words or the payload's size.
    """
    word_count = -1
    block_words = 1
    lengths: list[int] = []
    is_aligned = len(payload) >= _ALIGNMENT and len(payload) % _ALIGNMENT == 0
    if is_aligned:
        # The longest header that the words can have, in one read.
        most_blocks = -(-len(words) // min(_BLOCK_WORDS.values()))
        longest = _HEADER_BYTES + 4 * _STREAMS_PER_BLOCK * most_blocks
        word_count, block_words, *lengths = payload[:longest].view(torch.int32).tolist()
    starts = range(0, len(words), max(block_words, 1))
    header_end = _HEADER_BYTES + 4 * _STREAMS_PER_BLOCK * len(starts)
    lengths = lengths[: _STREAMS_PER_BLOCK * len(starts)]
    size = header_end
    for i, length in enumerate(lengths):
        size += length * _STREAM_DTYPES[i % len(_STREAM_DTYPES)].itemsize
    claimed = (word_count, len(lengths), _align(size))
    actual = (len(words), _STREAMS_PER_BLOCK * len(starts), len(payload))
    if claimed != actual or min(lengths, default=0) < 0:
        raise ValueError(
            f"delta: a payload of {len(payload)} bytes for {word_count} words "
            f"does not fit {len(words)} words"
        )

    columns = _columns(payload, header_end, lengths)
    blocks = []
    for i, start in enumerate(starts):
        gaps = columns[2 * i]
        steps = columns[2 * i + 1]
        if any(len(stream) for stream in gaps + steps):
            blocks.append((words[start : start + block_words], gaps, steps))
    return blocks


def _columns(payload: torch.Tensor, offset: int, lengths: list[int]) -> list[Streams]:
    """The streams of every column, cut from the payload from `offset` on."""
    column_count = len(lengths) // len(_STREAM_DTYPES)
    columns: list[Streams] = [[] for _ in range(column_count)]
    for i, dtype in enumerate(_STREAM_DTYPES):
        for column, length in zip(columns, lengths[i :: len(_STREAM_DTYPES)], strict=True):
            end = offset + length * dtype.itemsize
            column.append(payload[offset:end].view(dtype))
            offset = end
    return columns


def _join(streams: Streams, faults: list[torch.Tensor]) -> torch.Tensor:
    """The column (int32 [c]) that was split into `streams`; faults as `_decode`."""
    column, words, numbers = streams
    column = _insert_escaped(words.int() & _MAX_WORD, column, _MAX_WORD, faults)
    if not len(numbers):  # the column begins in the 16-bit stream
        return column
    return _insert_escaped(numbers.int() & _MAX_BYTE, column, _MAX_BYTE, faults)


def _insert_escaped(
    column: torch.Tensor, wider: torch.Tensor, escape: int, faults: list[torch.Tensor]
) -> torch.Tensor:
    """Replace each `escape` in a column by the next number of the wider stream; faults as
    `_decode`."""
    escaped = column == escape
    faults.append(escaped.count_nonzero() != len(wider))
    if len(wider) and len(column):
        # Also where there are fewer: then it is a fault, and any place in the column will do.
        places = torch.nonzero_static(escaped, size=len(wider), fill_value=0).flatten()
        column.index_copy_(0, places, wider)
    return column


class Mirror:
    """What a receiver got from each sender last, bucket by bucket, in the checkpoint's layout.

    Deltas are applied here, where no engine has packed or fused anything.
    """

    def __init__(self, plan: BucketPlan, device: torch.device) -> None:
        """`device`: the receiver's, on which `update` returns the buckets."""
        self.plan = plan
        self.device = device
        # One block per bucket and not per part: large blocks go back to the system when they are
        # freed.
        self.buckets = [torch.zeros(bucket.nbytes, dtype=torch.uint8) for bucket in plan.buckets]

    def pin(self) -> None:
        """Pin the memory, so that a GPU reads it faster.

        Not in the constructor: pinned memory would not go back to the system if the mirror turns
        out not to be needed.
        """
        if self.device.type == "cuda" and not all(bucket.is_pinned() for bucket in self.buckets):
            self.buckets = [bucket.pin_memory() for bucket in self.buckets]

    def parts(self, index: int) -> Parts:
        """Each sender's part of bucket `index` as it was sent last; the caller may change it."""
        return self.plan.buckets[index].split_parts(self.buckets[index])

    def update(self, index: int, messages: Parts) -> Parts:
        """Apply the messages to bucket `index`.

        Args:
            index: of the bucket.
            messages: sender -> its whole part, or a delta payload, which is always shorter; uint8.

        Returns:
            Sender -> its whole new part: uint8, on the receiver's device.
        """
        parts = self.parts(index)
        for sender, message in messages.items():
            part = parts[sender]
            if len(message) == len(part):
                part.copy_(message)
            else:
                delta.apply(message.to(part.device), part)
        return {sender: part.to(self.device, non_blocking=True) for sender, part in parts.items()}
