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
_FULL = {torch.uint8: 0xFF, torch.int16: 0xFFFF}


def encode(new: torch.Tensor, base: torch.Tensor, most: int | None = None) -> torch.Tensor | None:
    """The payload (uint8 [m], m a multiple of 16, on the tensors' device) that makes `new` of `base` (both uint8 [n], n a
    multiple of 16), or None if it would have `most` (default n) bytes or more: then sending all of `new` is cheaper. The
    largest temporaries, beside the payload's parts, are about 40 bytes for each word of a block, not of the bucket."""
    most = len(new) if most is None else most
    words, before, block = new.view(torch.int16), base.view(torch.int16), _BLOCK[new.device.type]
    if len(words) >= 2**31:  # the header could not say so
        return None
    lengths, streams = [len(words), block], {dtype: [] for dtype in _WIDTHS}
    size = 4 * (2 + 6 * -(-len(words) // block))
    for start in range(0, len(words), block):
        for column in _changes(words[start : start + block], before[start : start + block]):
            for dtype, stream in zip(_WIDTHS, _split(column), strict=True):
                streams[dtype].append(stream)
                lengths.append(len(stream))
                size += stream.nbytes
        if -(-size // 16) * 16 >= most:
            return None
    header = torch.tensor(lengths, dtype=torch.int32).to(new.device)
    padding = header.new_zeros(16, dtype=torch.uint8)
    parts = [header, *(stream for dtype in _WIDTHS for stream in streams[dtype]), padding]
    return torch.cat([part.view(torch.uint8) for part in parts])[: -(-size // 16) * 16]


def _changes(new: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gaps and folded differences (int32 [c] each) of the words (int16 [k]) that differ. Looks for rows of words first,
    64 bytes where the block divides into such: finding single words costs much more than comparing."""
    shift, seen = (3, torch.int16) if len(new) % 32 else (5, torch.int64)  # a row is 8 or 32 words
    rows = (new.view(torch.int64) != old.view(torch.int64)).view(seen).nonzero().flatten()
    new, old = (words.view(torch.int64).view(-1, (1 << shift) // 4).index_select(0, rows) for words in (new, old))
    step = (new.view(torch.int16) - old.view(torch.int16)).flatten()
    at = step.nonzero().flatten()
    step = step.index_select(0, at).int()
    at = ((rows << shift).index_select(0, at >> shift) + (at & (1 << shift) - 1)).int()
    return torch.diff(at, prepend=at.new_full((1,), -1)) - 1, ((step << 1) ^ (step >> 15)) & 0xFFFF


def _split(column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The streams of a column (int32 [c], none negative), as `_WIDTHS` has them."""
    wide = column[column >= 0xFF]
    if 2 * len(wide) < len(column):
        narrow = column.clamp(max=0xFF).to(torch.uint8)
    else:
        narrow, wide = column.new_empty(0, dtype=torch.uint8), column
    return wide[wide >= 0xFFFF], wide.clamp(max=0xFFFF).to(torch.int16), narrow


def apply(payload: torch.Tensor, words: torch.Tensor) -> None:
    """Make of `words` (uint8 [n]), which holds `base`, the `new` that `payload` was encoded from. Raises ValueError, with
    `words` as they were: the payload belongs to another size, or contradicts itself. It cannot tell another base, nor
    damage that leaves a valid payload: compare checksums."""
    words = words.view(torch.int16)
    blocks = _blocks(payload, len(words))
    blocks = [block for block in blocks if any(map(len, (*block[2], *block[3])))]
    for write in (False, True):  # nothing is written before all blocks have been checked
        for start, stop, gaps, steps in blocks:
            at = (_join(gaps).long() + 1).cumsum(0) - 1
            step = _join(steps)
            if len(at) != len(step) or len(at) and int(at[-1]) >= stop - start:
                raise ValueError(f"delta: its positions are not within words {start} to {stop}")
            if write:
                step = ((step >> 1) ^ -(step & 1)).to(torch.int16)
                part = words[start:stop]
                part.scatter_(0, at, part.index_select(0, at) + step)


def _blocks(payload: torch.Tensor, count: int) -> list[tuple[int, int, list[torch.Tensor], list[torch.Tensor]]]:
    """Per block its first word, the one after its last, and the streams of its two columns, as `_WIDTHS` has them; of a
    bucket of `count` words. Raises ValueError: the header fits neither that nor the payload's size."""
    of, block = payload[:8].view(torch.int32).tolist() if len(payload) >= 16 else (-1, 0)
    starts = range(0, count, block) if of == count and block > 0 else range(0)
    at = 8 + 24 * len(starts)
    if of != count or count and not starts or at > len(payload):
        raise ValueError(f"delta: a payload of {len(payload)} bytes for {of} words, and here are {count}")
    lengths = payload[8:at].view(torch.int32).view(-1, 3).cpu()
    streams: list[list[torch.Tensor]] = [[] for _ in lengths]
    for dtype, sizes in zip(_WIDTHS, lengths.T.tolist(), strict=True):
        for stream, size in zip(streams, sizes, strict=True):
            end = at + size * dtype.itemsize
            if size < 0 or end > len(payload):
                raise ValueError(f"delta: a payload of {len(payload)} bytes breaks off")
            stream.append(payload[at:end].view(dtype))
            at = end
    if -(-at // 16) * 16 != len(payload):
        raise ValueError(f"delta: a payload of {len(payload)} bytes, of which only {at} are used")
    columns = zip(starts, streams[::2], streams[1::2], strict=True)
    return [(start, min(start + block, count), gaps, steps) for start, gaps, steps in columns]


def _join(streams: list[torch.Tensor]) -> torch.Tensor:
    """The column (int32 [c]) that was split into `streams`. Raises ValueError: they do not belong together."""
    column = streams[0]
    if len(column) and int(column.amin()) < 0xFFFF:
        raise ValueError("delta: a number stands in a stream wider than it needs")
    for stream in streams[1:]:
        full = _FULL[stream.dtype]
        numbers = stream.int() & full
        escaped = numbers == full
        # Only a column that begins in the wider stream leaves the narrow one empty.
        if len(stream) or stream.dtype == torch.int16:
            if int(escaped.sum()) != len(column):
                raise ValueError("delta: the streams of a column do not fit together")
            column = numbers.masked_scatter_(escaped, column) if len(column) else numbers
    return column
