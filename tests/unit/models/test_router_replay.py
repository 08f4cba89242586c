"""Experts that are given to routers: bit for bit what the routers do with their own choice, and
nothing else where another choice is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from one_step_off.config.errors import ConfigError
from one_step_off.models import router_replay
from one_step_off.models.router_replay import RouterReplay, routers_of
from tests.unit.models.families import CONFIGS

CHOOSE_BY_TOPK = [
    *("qwen2_moe", "qwen3_moe", "qwen3_5_moe_text", "mixtral", "glm4_moe", "deepseek_v3", "olmoe"),
    *("ernie4_5_moe", "minimax_m2", "hunyuan_v1_moe", "granitemoe", "gpt_oss"),
]
DENSE = ["qwen2", "qwen3", "llama", "qwen3_5_text"]
TOKENS = 11


def config_of(name: str) -> Any:
    if name == "gpt_oss":
        settings: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
        sizes = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 16, "head_dim": 16}
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
        return transformers.GptOssConfig(**sizes, **settings, pad_token_id=0)
    return CONFIGS[name]()


def model_of(name: str) -> Any:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config_of(name))
    return model.eval()


def recorded_choice(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The experts that a model's routers choose themselves, int16 [tokens, layers, k]."""
    layers: dict[int, torch.Tensor] = {}
    hooks = []
    for layer, router in routers_of(model):

        def keep(module: Any, args: Any, output: Any, layer: int = layer) -> None:
            indices = [part for part in output if not part.is_floating_point()]
            layers[layer] = indices[0]

        hooks.append(router.register_forward_hook(keep))
    with torch.no_grad():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    first = next(iter(layers.values()))
    count = model.config.num_hidden_layers
    rows = [layers.get(layer, torch.zeros_like(first)) for layer in range(count)]
    return torch.stack(rows, 1).to(torch.int16)


def logits_and_gradients(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    logits = model(ids, use_cache=False).logits
    logits.log_softmax(-1)[..., 5].sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [logits.detach(), *(gradient.clone() for gradient in gradients)]


@pytest.mark.parametrize("name", CHOOSE_BY_TOPK)
def test_its_own_choice_changes_no_bit(name):
    model = model_of(name)
    ids = torch.randint(1, 60, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    chosen = recorded_choice(model, ids)
    free = logits_and_gradients(model, ids)
    replay = RouterReplay(model)
    replay.use(chosen)
    given = logits_and_gradients(model, ids)
    replay.use(None)
    free_again = logits_and_gradients(model, ids)
    for own, with_given, last in zip(free, given, free_again, strict=True):
        assert torch.equal(own, with_given)
        assert torch.equal(own, last)


@pytest.mark.parametrize("name", CHOOSE_BY_TOPK)
def test_other_experts_are_taken_where_they_are_given_and_only_there(name):
    model = model_of(name)
    ids = torch.randint(1, 60, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    chosen = recorded_choice(model, ids)
    other = torch.tensor(3, dtype=torch.int16) - chosen  # of four experts, two others or swapped
    given = torch.full_like(chosen, -1)
    given[6:] = other[6:]
    free = model(ids, use_cache=False).logits
    replay = RouterReplay(model)
    replay.use(given)
    replayed = model(ids, use_cache=False).logits
    used = recorded_choice(model, ids)
    sparse = [layer for layer, _ in routers_of(model)]
    assert torch.equal(used[6:, sparse], other[6:, sparse])
    assert torch.equal(used[:6, sparse], chosen[:6, sparse])
    torch.testing.assert_close(free[0, :6], replayed[0, :6])
    assert not torch.allclose(free[0, 6:], replayed[0, 6:])


def test_a_choice_among_groups_of_experts_stays_the_routers_own():
    hf_config = CONFIGS["deepseek_v3"]()
    hf_config.n_routed_experts = hf_config.num_local_experts = 8
    hf_config.n_group, hf_config.topk_group = 4, 2  # as many groups as experts are chosen
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(hf_config).eval()
    ids = torch.randint(1, 60, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    chosen = recorded_choice(model, ids)
    assert chosen.max() > 3
    free = logits_and_gradients(model, ids)
    replay = RouterReplay(model)
    replay.use(chosen)
    for own, given in zip(free, logits_and_gradients(model, ids), strict=True):
        assert torch.equal(own, given)


def on_meta(name: str) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config_of(name))


@pytest.mark.parametrize("name", CHOOSE_BY_TOPK)
def test_models_whose_routers_choose_by_topk_are_accepted(name):
    router_replay.check(on_meta(name), f"model.path={name}")


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_model_is_refused_by_name(name):
    message = f"rollout.replay_routing=true: model.path={name} has no experts"
    with pytest.raises(ConfigError, match=message):
        router_replay.check(on_meta(name), f"model.path={name}")


def test_a_router_that_chooses_otherwise_is_refused_by_name():
    with pytest.raises(ConfigError, match="PhimoeTopKRouter, that does not choose by topk"):
        router_replay.check(on_meta("phimoe"), "model.path=phimoe")


def test_a_router_that_does_not_ask_is_no_silent_replay():
    model = model_of("phimoe")
    replay = RouterReplay(model)
    replay.use(torch.zeros(TOKENS, 2, 2, dtype=torch.int16))
    with pytest.raises(RuntimeError, match="PhimoeTopKRouter chose 0 times by topk"):
        model(torch.ones(1, TOKENS, dtype=torch.int64), use_cache=False)
