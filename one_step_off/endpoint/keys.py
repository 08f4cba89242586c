"""The keys that agents send: one per episode, and one for fleets of agents that ask for work.

An episode's key is "ose-REPLICA-RANDOM". Its last characters are a signature. So the gateway
refuses a forged key without asking a replica, and a replica that was restarted knows a key of its
predecessor from a forged one. The signature opens nothing: a request needs the key of an open
episode.
"""

import base64
import hashlib
import hmac
import re
import secrets

FLEET_PREFIX = "ose-fleet-"
RANDOM_BYTES = 18
SIGNATURE_BYTES = 6

_EPISODE_KEY = re.compile(r"ose-(0|[1-9][0-9]{0,5})-([A-Za-z0-9_-]{24})([A-Za-z0-9_-]{8})")


def make_service_key() -> str:
    """A new key for `GET /v1/episodes/next`."""
    return FLEET_PREFIX + secrets.token_urlsafe(24)


class EpisodeKeys:
    """Makes and checks the keys of a run's episodes. What it signs with comes from the fleet key,
    so that a restarted process, or attempt, knows the keys of the one before."""

    def __init__(self, service_key: str) -> None:
        self.service_key = service_key
        self._secret = hashlib.sha256(b"episode keys of " + service_key.encode()).digest()

    def make(self, replica_index: int) -> str:
        """A new key of an episode on that replica."""
        random = secrets.token_urlsafe(RANDOM_BYTES)
        return f"ose-{replica_index}-{random}{self._signature(str(replica_index), random)}"

    def replica_index(self, key: str) -> int | None:
        """The replica of a key that `make` made; None: it is another text."""
        match = _EPISODE_KEY.fullmatch(key)
        if match is None:
            return None
        index, random, signature = match.groups()
        if not hmac.compare_digest(signature, self._signature(index, random)):
            return None
        return int(index)

    def is_service_key(self, key: str) -> bool:
        """Whether this is the run's fleet key."""
        return hmac.compare_digest(key.encode(errors="replace"), self.service_key.encode())

    def _signature(self, index: str, random: str) -> str:
        digest = hmac.digest(self._secret, f"{index}-{random}".encode(), "sha256")
        return base64.urlsafe_b64encode(digest[:SIGNATURE_BYTES]).decode()
