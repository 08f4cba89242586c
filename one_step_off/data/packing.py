"""Lists of arrays and samples that travel to another process as a few long arrays.

Ray takes longer over each of a hundred thousand small arrays than over their bytes. These classes
change only how a list or dict is pickled: it arrives as a plain list or dict.
"""

import operator
from dataclasses import fields

import numpy as np

from one_step_off.data.arrays import split_by_lengths
from one_step_off.data.samples import TOKEN_FIELDS, Sample


class PackedArrays(list[np.ndarray]):
    """Travels as one long array, and arrives as a list of its parts, which are read-only."""

    def __reduce__(self) -> tuple:
        if not self:
            return (list, ())
        return (split_by_lengths, (np.concatenate(self), [len(array) for array in self]))


class PackedSamples(list[Sample]):
    """Travels as one long array per token field, and arrives as a list of samples.

    `omitted_fields` are left out of the transfer; they have their defaults on arrival.
    """

    omitted_fields: tuple[str, ...] = ()

    def __reduce__(self) -> tuple:
        names = []
        for field in fields(Sample):
            if field.name not in TOKEN_FIELDS and field.name not in self.omitted_fields:
                names.append(field.name)
        rows = list(map(operator.attrgetter(*names), self))
        columns = [PackedArrays(getattr(sample, name) for sample in self) for name in TOKEN_FIELDS]
        return _unpack_samples, (names, rows, columns)


class PackedShares(dict[int, np.ndarray]):
    """Position in a batch -> array, for some samples: travels as one long array, arrives as a
    dict.
    """

    def __reduce__(self) -> tuple:
        return _unpack_shares, (list(self), PackedArrays(self.values()))


def _unpack_samples(
    names: list[str], rows: list[tuple], columns: list[list[np.ndarray]]
) -> list[Sample]:
    """Samples from `rows` with the fields `names`, and `columns` with the TOKEN_FIELDS."""
    all_names = (*names, *TOKEN_FIELDS)
    samples = []
    for row, *arrays in zip(rows, *columns, strict=True):
        values = dict(zip(all_names, (*row, *arrays), strict=True))
        samples.append(Sample(**values))
    return samples


def _unpack_shares(positions: list[int], arrays: list[np.ndarray]) -> dict[int, np.ndarray]:
    return dict(zip(positions, arrays, strict=True))
