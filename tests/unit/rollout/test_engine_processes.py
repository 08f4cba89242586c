"""How the processes of an engine that did not start have ended, by vLLM's error."""

from __future__ import annotations

import pytest

from one_step_off.cluster.errors import ProcessDied
from one_step_off.rollout.engine_processes import named_deaths

MESSAGE = "Engine core initialization failed. See root cause above. Failed core proc(s): "


@pytest.mark.parametrize(
    ("finished", "death"),
    [
        ("{'EngineCore': -9}", "its engine's process EngineCore died (SIGKILL)"),
        ("{'EngineCore_DP0': 1, 'EngineCore_DP1': -11}", "EngineCore_DP1 died (SIGSEGV)"),
        ("{'EngineCore': -40}", "EngineCore died (signal 40)"),
    ],
)
def test_an_engine_that_a_signal_has_ended_has_died(finished, death):
    with pytest.raises(ProcessDied) as caught, named_deaths():
        raise RuntimeError(MESSAGE + finished)
    assert death in str(caught.value)


@pytest.mark.parametrize(
    "failure",
    [
        RuntimeError(MESSAGE + "{'EngineCore': 1}"),
        RuntimeError(MESSAGE + "{}"),
        ValueError("max_model_len is too large: -9"),
    ],
)
def test_an_engine_that_raised_has_not(failure):
    with pytest.raises(type(failure)) as caught, named_deaths():
        raise failure
    assert caught.value is failure
