"""Which ranks send, and what each of the others gives to its sender.

Every sender has a group with all receivers, so a receiver would hold one communicator per trainer
rank. `weight_sync.max_senders` bounds that: the ranks are divided into groups of neighbors, which
means within a node first. The first rank of a group, its leader, sends the pieces of all its
members; rows that lie side by side leave as one piece. So plans and receivers do not grow with the
number of ranks either. `member_link.py` brings the members' pieces to the leader.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from one_step_off.weight_sync.bucket_plan import BucketPlan, Pieces, Slot, pieces_by_tensor
from one_step_off.weight_sync.weight_piece import WeightPiece


@dataclass(frozen=True)
class SenderGroup:
    """Neighboring ranks whose pieces one of them sends."""

    ranks: tuple[int, ...]
    """The leader first."""
    pieces: list[WeightPiece]
    """What the leader sends: the pieces of all members, joined where they lie side by side."""

    @property
    def leader(self) -> int:
        """The rank that sends."""
        return self.ranks[0]

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that give their pieces to the leader."""
        return self.ranks[1:]


def form_groups(pieces: Pieces, max_senders: int) -> list[SenderGroup]:
    """The senders and their groups, in the order of their ranks. Ranks without pieces are in none.

    Args:
        pieces: per rank the pieces that it owns.
        max_senders: weight_sync.max_senders; 0: as many as there are ranks.

    Raises:
        SyncError: as `pieces_by_tensor`.
    """
    owners = [rank for rank, owned in enumerate(pieces) if owned]
    if max_senders == 0 or len(owners) <= max_senders:
        return [SenderGroup((rank,), pieces[rank]) for rank in owners]
    borders = [len(owners) * i // max_senders for i in range(max_senders + 1)]
    group_of_owner: list[int] = []
    for group, (start, stop) in enumerate(itertools.pairwise(borders)):
        group_of_owner += [group] * (stop - start)
    pieces_of_group: Pieces = [[] for _ in range(max_senders)]
    for parts in pieces_by_tensor([pieces[rank] for rank in owners]):
        for group, joined in _join_neighbors(parts, group_of_owner):
            pieces_of_group[group].append(joined)
    groups = []
    for group, (start, stop) in enumerate(itertools.pairwise(borders)):
        groups.append(SenderGroup(tuple(owners[start:stop]), pieces_of_group[group]))
    return groups


def _join_neighbors(
    parts: list[tuple[int, WeightPiece]], group_of_owner: list[int]
) -> Iterator[tuple[int, WeightPiece]]:
    """(group, piece): one tensor's pieces, of which those that follow one another in one group are
    joined. `parts`: (owner, piece) in the order of rows, without gaps."""
    for group, run in itertools.groupby(parts, key=lambda part: group_of_owner[part[0]]):
        run_pieces = [piece for _, piece in run]
        yield group, replace(run_pieces[0], stop=run_pieces[-1].stop)


@dataclass(frozen=True)
class Section:
    """What one rank has of a slot of its group."""

    slot: Slot
    """Of the group, in the leader's part of a bucket."""
    own: Slot
    """The rank's part of it; its offset is that in the rank's message of this bucket."""

    def place_in(self, part: torch.Tensor) -> torch.Tensor:
        """Where the rank's data belongs in the leader's part: a view of `part` (uint8 [n])."""
        return self.own.piece.slice_of(self.slot.view(part), self.slot.piece.start)


def sections_of_rank(
    plan: BucketPlan, sender: int, pieces: list[WeightPiece]
) -> list[list[Section]]:
    """Per bucket what a rank has of its group's part, in the order in which the rank yields its
    data.

    Args:
        plan: of all senders.
        sender: the index of the rank's group.
        pieces: the rank's own.
    """
    pieces_of_tensor: dict[str, list[WeightPiece]] = {}
    for piece in pieces:
        pieces_of_tensor.setdefault(piece.name, []).append(piece)
    sections_of_bucket = []
    for bucket in plan.buckets:
        sections: list[Section] = []
        offset = 0
        for slot in bucket.slots_of(sender):
            for piece in pieces_of_tensor.get(slot.piece.name, ()):
                start = max(piece.start, slot.piece.start)
                stop = min(piece.stop, slot.piece.stop)
                if start < stop:
                    own = Slot(replace(piece, start=start, stop=stop), piece, sender, offset)
                    sections.append(Section(slot, own))
                    offset += own.padded_bytes
        sections_of_bucket.append(sections)
    return sections_of_bucket


def message_bytes(sections: list[Section]) -> int:
    """Bytes of a rank's message of one bucket."""
    if not sections:
        return 0
    last = sections[-1].own
    return last.offset + last.padded_bytes
