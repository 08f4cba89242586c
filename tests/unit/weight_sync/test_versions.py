"""Which weights are where: what contradicts the table is refused at the change."""

from __future__ import annotations

import pytest

from one_step_off.weight_sync.versions import VersionTable


def begun(trained: int = 3) -> VersionTable:
    versions = VersionTable()
    versions.begin(attempt=1, trained=trained)
    return versions


def test_a_step_with_its_sync():
    versions = begun()
    versions.send((1, 3), [])
    versions.sync_ended(3)
    versions.step_ended(3)
    assert (versions.trained, versions.sent, versions.synced) == (4, (1, 3), 3)
    versions.send((1, 4), [])
    assert versions.synced == 3, "the replicas have not received v4 yet"
    versions.sync_ended(4)
    versions.begin(attempt=2, trained=2)
    assert (versions.sent, versions.synced) == (None, -1)


@pytest.mark.parametrize(
    ("stamp", "words"),
    [
        ((1, 4), "trained v3, sent v3, synced v3: v4 of attempt 1 is sent"),
        ((1, 2), "v2 of attempt 1 is sent"),
        ((0, 3), "attempt 1: .* v3 of attempt 0 is sent"),
    ],
)
def test_weights_that_the_trainer_does_not_hold_are_never_sent(stamp, words):
    versions = begun()
    versions.send((1, 3), [])
    versions.sync_ended(3)
    with pytest.raises(AssertionError, match=words):
        versions.send(stamp, [])


def test_only_what_was_sent_can_have_arrived_and_steps_are_counted_one_by_one():
    versions = begun()
    with pytest.raises(AssertionError, match="sent nothing, synced v-1: a sync of v3 ended"):
        versions.sync_ended(3)
    versions.send((1, 3), [])
    with pytest.raises(AssertionError, match="a sync of v2 ended"):
        versions.sync_ended(2)
    for step in (2, 4):
        with pytest.raises(AssertionError, match=f"step {step} ended"):
            versions.step_ended(step)


def test_a_check_without_a_pipeline_syncs_what_it_likes():
    versions = VersionTable()
    for stamp in ((0, 5), (1, 0), (0, 2)):
        versions.send(stamp, [])
    assert versions.sent == (0, 2)
