"""Fixtures of the tests of agent loops."""

from __future__ import annotations

import pytest

from one_step_off.models import tiny_qwen


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_qwen.build_tokenizer()
