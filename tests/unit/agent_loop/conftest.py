"""Fixtures of the tests of agent loops."""

from __future__ import annotations

import pytest

from tests.unit.agent_loop.external_setting import Setting
from tests.unit.stand_ins import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def setting(tokenizer, tmp_path):
    """setting(**agent_settings): a loop `external`."""
    return lambda **settings: Setting(tokenizer, tmp_path, **settings)
