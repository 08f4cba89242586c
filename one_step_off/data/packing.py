"""Samples and batches that travel to another process.

Ray takes longer over each of a hundred thousand small arrays than over their bytes. `PackedArrays`,
`PackedSamples` and `PackedShares` change only how a list or dict is pickled: it travels as a few
long arrays, and arrives as a plain list or dict.

Of a batch that is divided each rank receives only its share: the tokens of its own samples, and of
all others the lengths and counts from which every rank plans alike. `put_slices` in
`training/trainer_group.py` sends them as `SampleSlice` and `ArraySlice`. What arrives is a `Batch`
with all its samples; those of other shares are `AbsentSample`s.
"""

import operator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from one_step_off.data.arrays import split_by_lengths
from one_step_off.data.samples import TOKEN_FIELDS, PolicyVersion, Sample


class PackedArrays(list[np.ndarray]):
    """Travels as one long array, and arrives as a list of its parts, which are read-only."""

    def __reduce__(self) -> tuple:
        if not self:
            return (list, ())
        return (split_by_lengths, (np.concatenate(self), [len(array) for array in self]))


class PackedSamples(list[Sample]):
    """Travels as one long array per token field, and arrives as a list of samples. An array that
    several samples hold travels once.

    `omitted_fields` are left out of the transfer; they have their defaults on arrival.
    """

    omitted_fields: tuple[str, ...] = ()

    def __reduce__(self) -> tuple:
        column_names = TOKEN_FIELDS
        if all(sample.response_experts is not None for sample in self):
            column_names += ("response_experts",)
        names = []
        for field in fields(Sample):
            if field.name not in column_names and field.name not in self.omitted_fields:
                names.append(field.name)
        rows = list(map(operator.attrgetter(*names), self))
        columns = [PackedArrays(getattr(sample, name) for sample in self) for name in column_names]
        return _unpack_samples, ([*names, *column_names], rows, columns)


class PackedShares(dict[int, np.ndarray]):
    """Position in a batch -> array, for some samples: travels as one long array, arrives as a
    dict.
    """

    def __reduce__(self) -> tuple:
        return _unpack_shares, (list(self), PackedArrays(self.values()))


def _unpack_samples(
    names: list[str], rows: list[tuple], columns: list[list[np.ndarray]]
) -> list[Sample]:
    """Samples with the fields `names`: those of `rows`, then those of `columns`."""
    samples = []
    for row, *arrays in zip(rows, *columns, strict=True):
        values = dict(zip(names, (*row, *arrays), strict=True))
        samples.append(Sample(**values))
    return samples


def _unpack_shares(positions: list[int], arrays: list[np.ndarray]) -> dict[int, np.ndarray]:
    return dict(zip(positions, arrays, strict=True))


class AbsentSample(Sample):
    """A sample of another rank's share. Prompt id, lengths and the number of trained tokens are
    right; the tokens themselves did not come."""


def token_ids_of(sample: Sample) -> np.ndarray:
    """Prompt and response in one array, int32 [P + R].

    Raises:
        RuntimeError: the sample belongs to another rank's share.
    """
    if isinstance(sample, AbsentSample):
        raise RuntimeError(f"prompt {sample.prompt_id}: its tokens went to another rank")
    return np.concatenate([sample.prompt_ids, sample.response_ids])


@dataclass
class BatchOutline:
    """What all ranks know of all B samples.

    Attributes:
        prompt_ids: int64 [B, 2], (epoch, row).
        prompt_lengths, response_lengths: int64 [B], in tokens.
        trained: int64 [B], trained tokens.
        stamp: the batch's expected one; `BatchSource.batch` has checked all tokens against it.
    """

    prompt_ids: np.ndarray
    prompt_lengths: np.ndarray
    response_lengths: np.ndarray
    trained: np.ndarray
    stamp: PolicyVersion

    @staticmethod
    def of(samples: list[Sample], stamp: PolicyVersion) -> "BatchOutline":
        """The outline of these samples."""
        return BatchOutline(
            np.array([s.prompt_id for s in samples], np.int64).reshape(-1, 2),
            np.array([len(s.prompt_ids) for s in samples], np.int64),
            np.array([len(s.response_ids) for s in samples], np.int64),
            np.array([s.loss_mask.sum() for s in samples], np.int64),
            stamp,
        )

    def absent_samples(self) -> list[Sample]:
        """All samples without their tokens. Their arrays take no memory of their own."""
        attempt, version = self.stamp
        most_trained = int(self.trained.max(initial=0))
        # Each mask is a window of this array that begins at as many places before its border as
        # tokens are trained.
        mask = np.zeros(most_trained + int(self.response_lengths.max(initial=0)), bool)
        mask[:most_trained] = True
        columns = (self.prompt_ids, self.prompt_lengths, self.response_lengths, self.trained)
        samples: list[Sample] = []
        for prompt_id, prompt, response, trained in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            start = most_trained - trained
            samples.append(
                AbsentSample(
                    prompt_id=tuple(prompt_id),
                    index=0,
                    prompt_ids=_filled(0, prompt, np.int32),
                    response_ids=_filled(0, response, np.int32),
                    log_probs=_filled(0, response, np.float32),
                    loss_mask=mask[start : start + response],
                    versions=_filled(version, response, np.int32),
                    attempt=attempt,
                )
            )
        return samples


def _filled(value: int, length: int, dtype: Any) -> np.ndarray:
    """`length` times the same value, in the memory of one."""
    return np.broadcast_to(np.array(value, dtype), (length,))


class SampleSlice(list[Sample]):
    """Travels with the tokens of the samples at `positions`, and arrives as a list of all samples,
    of which the others are `AbsentSample`s."""

    def __init__(
        self,
        samples: list[Sample],
        positions: list[int],
        outline: BatchOutline,
        omitted_fields: tuple[str, ...],
    ) -> None:
        """`omitted_fields`: see `PackedSamples`."""
        super().__init__(samples)
        self.positions = positions
        self.outline = outline
        self.omitted_fields = omitted_fields

    def __reduce__(self) -> tuple:
        own = PackedSamples(self[position] for position in self.positions)
        own.omitted_fields = self.omitted_fields
        return _unpack_sample_slice, (self.outline, self.positions, own)


class ArraySlice(list[np.ndarray]):
    """Travels with the arrays at `positions`, and arrives as a list in which all others are
    zeros."""

    def __init__(
        self, arrays: list[np.ndarray], positions: list[int], outline: BatchOutline
    ) -> None:
        super().__init__(arrays)
        self.positions = positions
        self.outline = outline

    def __reduce__(self) -> tuple:
        own = PackedArrays(self[position] for position in self.positions)
        return _unpack_array_slice, (self.outline, self.positions, own)


def _unpack_sample_slice(
    outline: BatchOutline, positions: list[int], own: list[Sample]
) -> list[Sample]:
    samples = outline.absent_samples()
    for position, sample in zip(positions, own, strict=True):
        samples[position] = sample
    return samples


def _unpack_array_slice(
    outline: BatchOutline, positions: list[int], own: list[np.ndarray]
) -> list[np.ndarray]:
    arrays = [_filled(0, length, np.float32) for length in outline.response_lengths.tolist()]
    for position, array in zip(positions, own, strict=True):
        arrays[position] = array
    return arrays
