"""Fixtures of the tests of agent loops."""

from __future__ import annotations

import pytest

from one_step_off.models import tiny_qwen
from tests.unit.agent_loop.external_setting import Setting


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_qwen.build_tokenizer()


@pytest.fixture
def setting(tokenizer, tmp_path):
    """setting(**agent_settings): a loop `external`."""
    return lambda **settings: Setting(tokenizer, tmp_path, **settings)
