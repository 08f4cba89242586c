"""What changed between two states of a weight bucket, exactly and in few bytes.

A bucket is seen as 16-bit words, and what changed as two columns of small numbers: gaps between changed words, and
differences of their bit patterns mod 2^16, folded to 0, 1, 2.. for 0, -1, 1.. After an optimiser step at a learning rate
of RL most bf16 weights stay as they are and the rest move to a neighbour, so both columns mostly fit one byte.

A payload holds, in this order: the words of the bucket and of a block (int32); for each block the lengths of its six
streams (int32); all int32 streams, all 16-bit streams, all 8-bit streams; zeros up to a multiple of 16 bytes. A number
that does not fit a stream stands there as the stream's largest value, and itself in the next wider one. A column of
which half would not fit begins in the 16-bit stream.
"""

import torch

# Words: few enough for small temporaries, enough to hide what calling an operation costs.
_BLOCK = {"cpu": 1 << 21, "cuda": 1 << 23}
_WIDTHS = (torch.int32, torch.int16, torch.uint8)


def encode(new: torch.Tensor, base: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """The payload (uint8 [m], m a multiple of 16, on the tensors' device) that makes `new` of `base` (both uint8 [n], n a
    multiple of 16), or None if it would have n bytes or more: then sending all of `new` is cheaper. And how many words
    differ. The largest temporaries, beside the payload's parts, are about 40 bytes for each word of a block, not of the
    bucket."""
    words, before, block = new.view(torch.int16), base.view(torch.int16), _BLOCK[new.device.type]
    parts, changed = [], 0
    for start in range(0, len(words), block):
        gaps, steps = _changes(words[start : start + block], before[start : start + block])
        parts += [*_split(gaps), *_split(steps)]
        changed += len(gaps)
    size = -(-(4 * (2 + len(parts)) + sum(part.nbytes for part in parts)) // 16) * 16
    if size >= len(new) or len(words) >= 2**31:  # the header could not say so
        return None, changed
    header = torch.tensor([len(words), block, *map(len, parts)], dtype=torch.int32).to(new.device)
    parts = [header, *sorted(parts, key=lambda part: -part.itemsize), new.new_zeros(16)]
    return torch.cat([part.view(torch.uint8) for part in parts])[:size], changed


def _changes(new: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gaps and folded differences (int32 [c] each) of the words (int16 [k]) that differ. Looks for rows of words first,
    64 bytes where the block divides into such: finding single words costs much more than comparing."""
    shift, seen = (3, torch.int16) if len(new) % 32 else (5, torch.int64)  # a row is 8 or 32 words
    rows = (new.view(torch.int64) != old.view(torch.int64)).view(seen).nonzero().flatten()
    new, old = (
        words.view(torch.int64).view(-1, (1 << shift) // 4).index_select(0, rows)
        for words in (new, old)
    )
    step = (new.view(torch.int16) - old.view(torch.int16)).flatten()
    at = step.nonzero().flatten()
    step = step.index_select(0, at).int()
    at = ((rows << shift).index_select(0, at >> shift) + (at & (1 << shift) - 1)).int()
    return torch.diff(at, prepend=at.new_full((1,), -1)) - 1, ((step << 1) ^ (step >> 15)) & 0xFFFF


def _split(column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The streams of a column (int32 [c], none negative), as `_WIDTHS` has them."""
    wide = column[column >= 0xFF]
    narrow, wide = (column, wide) if 2 * len(wide) < len(column) else (column[:0], column)
    return (
        wide[wide >= 0xFFFF],
        wide.clamp(max=0xFFFF).to(torch.int16),
        narrow.clamp(max=0xFF).to(torch.uint8),
    )


def apply(payload: torch.Tensor, words: torch.Tensor) -> None:
    """Make of `words` (uint8 [n]), which holds `base`, the `new` that `payload` was encoded from. Raises ValueError, with
    `words` as they were: the payload belongs to another size, or contradicts itself. It cannot tell another base, nor
    damage that leaves a valid payload: compare checksums."""
    blocks = _blocks(payload, words.view(torch.int16))
    for write in (False, True):  # nothing is written before all blocks have been checked
        for part, gaps, steps in blocks:
            at, step = (_join(gaps).long() + 1).cumsum(0) - 1, _join(steps)
            if len(at) != len(step) or not 0 <= int(at.min()) <= int(at.max()) < len(part):
                raise ValueError("delta: its positions are not within a block")
            if write:
                step = ((step >> 1) ^ -(step & 1)).to(torch.int16)
                part.scatter_(0, at, part.index_select(0, at) + step)


def _blocks(payload: torch.Tensor, words: torch.Tensor) -> list[tuple[torch.Tensor, list, list]]:
    """Each block of `words` (int16 [k]) that has changes, with the streams of its two columns, as `_WIDTHS` has them.
    Raises ValueError: the header fits neither the words nor the payload's size."""
    whole = len(payload) >= 16 and len(payload) % 16 == 0
    count, block = payload[:8].view(torch.int32).tolist() if whole else (-1, 1)
    starts = range(0, len(words), max(block, 1))
    at = 8 + 24 * len(starts)
    lengths = payload[8:at].view(torch.int32).tolist() if whole else []
    size = at + sum(length * _WIDTHS[i % 3].itemsize for i, length in enumerate(lengths))
    real = (len(words), 6 * len(starts), len(payload))
    if (count, len(lengths), -(-size // 16) * 16) != real or min(lengths, default=0) < 0:
        raise ValueError(
            f"delta: a payload of {len(payload)} bytes for {count} words does not fit {len(words)} words"
        )
    columns: list[list[torch.Tensor]] = [[] for _ in range(2 * len(starts))]
    for i, dtype in enumerate(_WIDTHS):
        for column, length in zip(columns, lengths[i::3], strict=True):
            column.append(payload[at : at + length * dtype.itemsize].view(dtype))
            at += length * dtype.itemsize
    parts = (words[start : start + block] for start in starts)
    rows = zip(parts, columns[::2], columns[1::2], strict=True)
    return [(part, gaps, steps) for part, gaps, steps in rows if any(map(len, gaps + steps))]


def _join(streams: list[torch.Tensor]) -> torch.Tensor:
    """The column (int32 [c]) that was split into `streams`. Raises ValueError: they do not belong together."""
    column, *narrower = streams
    for stream, full in zip(narrower, (0xFFFF, 0xFF), strict=True):
        numbers = stream.int() & full
        escaped = numbers == full
        if len(stream) or full == 0xFFFF:  # a column may begin in the 16-bit stream
            if int(escaped.sum()) != len(column):
                raise ValueError("delta: the streams of a column do not fit together")
            column = numbers.masked_scatter_(escaped, column)
    return column
