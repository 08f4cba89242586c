"""The optimizers that a config names: known names, their own settings, and what a critic takes from
the actor."""

from __future__ import annotations

import pytest

from one_step_off.config import packages
from one_step_off.config.roles import own_optimizers, role_settings
from one_step_off.runtime.validation import validate
from tests.unit.config.config_helpers import fault, good

CRITIC = (
    "placement.roles={rollout: rollout, actor: actor, critic: actor}",
    "algorithm.adv_estimator=gae",
)


@pytest.fixture
def with_torchao(monkeypatch):
    monkeypatch.setattr(packages, "is_installed", lambda name: True)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["actor.optimizer=muno"], ["actor.optimizer=muno", "did you mean muon?"]),
        (
            ["actor.optimizer=sgd"],
            ["actor.optimizer=sgd", "no such optimizer", "adamw, adamw_8bit, muon", "module:Class"],
        ),
        (["actor.optimizer=no_such_module:C"], ["no_such_module:C", "no such", "module exists"]),
        (
            ["actor.optimizer_kwargs={momentum: 0.9}"],
            ["optimizer_kwargs.momentum=0.9", "no such setting of adamw", "remove it"],
        ),
        (
            ["actor.optimizer=muon", "actor.optimizer_kwargs.momentun=0.9"],
            ["momentun=0.9", "did you mean momentum?"],
        ),
        (
            ["actor.optimizer=muon", "actor.optimizer_kwargs.momentum=1"],
            ["momentum=1", "below 1"],
        ),
        (
            ["actor.optimizer=muon", "actor.optimizer_kwargs.ns_steps=0"],
            ["ns_steps=0", "from 1 to 20"],
        ),
        (
            ["actor.optimizer=muon", "actor.optimizer_kwargs.adjust_lr_fn=moonshot"],
            ["adjust_lr_fn=moonshot", "match_rms_adamw or original"],
        ),
        (
            ["actor.optimizer=muon", "actor.optimizer_kwargs.nesterov=1"],
            ["nesterov=1", "true or false"],
        ),
        (
            ["actor.optimizer=adamw_8bit", "actor.optimizer_kwargs.block_size=8"],
            ["block_size=8", "from 32 to 4096"],
        ),
        (
            ["actor.optimizer=torch.optim:SGD", "actor.optimizer_kwargs.lr=1"],
            ["optimizer_kwargs.lr=1", "actor.lr sets it", "remove it"],
        ),
        (
            [*CRITIC, "critic.optimizer=muno"],
            ["critic.optimizer=muno", "did you mean muon?"],
        ),
        (
            ["actor.backend=megatron", "actor.optimizer=muon"],
            ["actor.optimizer=muon", "adamw alone", "actor.backend=fsdp"],
        ),
    ],
)
@pytest.mark.usefixtures("with_torchao")
def test_what_is_refused(arguments, parts):
    line = fault(*arguments)
    for part in parts:
        assert part in line, line


@pytest.mark.parametrize(
    "arguments",
    [
        ["actor.optimizer=muon", "actor.optimizer_kwargs={momentum: 0.9, nesterov: false}"],
        ["actor.optimizer=adamw_8bit", "actor.optimizer_kwargs.block_size=128"],
        ["actor.optimizer=torch.optim:SGD", "actor.optimizer_kwargs={momentum: 0.9}"],
        [*CRITIC, "actor.optimizer=muon", "critic.optimizer=adamw"],
    ],
)
@pytest.mark.usefixtures("with_torchao")
def test_what_is_accepted(arguments):
    validate(good(*arguments), 0)


def test_a_missing_package_is_named(monkeypatch):
    installed = packages.is_installed
    monkeypatch.setattr(
        packages, "is_installed", lambda name: name != "torchao" and installed(name)
    )
    line = fault("actor.optimizer=adamw_8bit")
    assert "torchao is missing; pip install 'torchao>=0.18,<0.19'" in line
    validate(good("actor.optimizer=muon"), 0)


def test_the_critic_takes_the_actors_optimizer():
    cfg = good(*CRITIC, "actor.optimizer=muon", "actor.optimizer_kwargs={momentum: 0.9}")
    assert role_settings(cfg, "critic").optimizer == "muon"
    assert role_settings(cfg, "critic").optimizer_kwargs == {"momentum": 0.9}
    cfg.critic.optimizer = "adamw"
    assert role_settings(cfg, "critic").optimizer_kwargs == {}, "muon's settings are not adamw's"


def test_the_users_own():
    cfg = good(*CRITIC, "critic.optimizer=torch.optim:SGD")
    assert list(own_optimizers(cfg)) == ["critic"]
    cfg.actor.optimizer = "torch.optim:RMSprop"
    assert list(own_optimizers(cfg)) == ["actor", "critic"]
    del cfg.placement.roles["critic"]
    assert list(own_optimizers(cfg)) == ["actor"]
