"""Agent loops on a scripted engine, and their samples against a model's own forward pass."""

from __future__ import annotations

import asyncio
import random
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.base import Generated, Limits, Loops, Trajectory
from agent_loop.tool_loop import hermes_calls, llama_calls
from benchmarks.agent_loop.stand_in_engine import StandInEngine, serve_through_loop
from one_step_off.algorithms.advantages import estimate_advantages
from one_step_off.algorithms.trajectories import Options, Trajectories
from one_step_off.config.data_checks import BUILT_IN_LOOPS, BUILT_IN_TOOLS
from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.config.schema import Config
from one_step_off.data.samples import NOT_GENERATED, Batch, Prompt
from one_step_off.data.staleness import StalenessError, assert_staleness
from one_step_off.data.word_problems import make_products, make_puzzles
from one_step_off.models import tiny_qwen
from one_step_off.rewards.reward import Reward

CHATML = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m['content'] }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if tools %}{{ tools | tojson }}{# <tool_call> #}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% for m in messages %}<|start|>{{ 'ipython' if m['role'] == 'tool' else m['role'] }}<|end|>\n\n"
    "{{ m['content'] | trim }}<|im_end|>{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_qwen.build_tokenizer()


def config(**changes) -> Config:
    cfg = Config()
    cfg.agent.loop, cfg.agent.tools, cfg.agent.loop_kwargs = (
        "tool",
        "calculator, python",
        {"tool": {"taught": True}},
    )
    for name, value in changes.items():
        setattr(cfg.agent, name, value)
    return cfg


class Script:
    """An engine that says what it is told to, in tokens; `asked` are the token ids of each request."""

    def __init__(self, tokenizer, *turns: str, end: bool = True, version: int = 3) -> None:
        self.tokenizer, self.turns, self.end, self.version = tokenizer, list(turns), end, version
        self.asked: list[list[int]] = []

    async def __call__(self, ids: np.ndarray, max_tokens: int) -> Generated:
        self.asked.append(ids.tolist())
        said = self.tokenizer.encode(self.turns.pop(0)) + [self.tokenizer.eos_token_id] * self.end
        cut = said[:max_tokens]
        log_probs = -0.01 * np.arange(1, len(cut) + 1, dtype=np.float32)
        versions = np.full(len(cut), self.version, np.int32)
        return Generated(
            np.array(cut, np.int32), log_probs, versions, 0, "stop" if cut == said else "length"
        )


def prompt(tokenizer, question: str = "What is 12 * 13?", truth: str = "156", **extra) -> Prompt:
    return Prompt(
        (0, 0),
        np.array(tiny_qwen.prompt_ids(tokenizer, question), np.int32),
        question,
        truth,
        extra=extra,
    )


USUAL = Limits(800, 8)


def run(cfg, tokenizer, engine, score=None, limits=USUAL, **kw) -> Trajectory:
    return asyncio.run(
        Loops(cfg, tokenizer).get().run(prompt(tokenizer, **kw), engine, score, limits)
    )


def call(expression: str) -> str:
    return f' <tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


def heard(talk: Trajectory, tokenizer) -> list[str]:
    return [tokenizer.decode(s.ids) for s in talk.segments if s.role != "assistant"]


FOUR = (call("12 * 13"), call("1 +") + call("2 * 3"), " <tool_call>{oops</tool_call>", " #### 156")


def test_a_conversation_of_four_turns_in_tokens(tokenizer):
    engine = Script(tokenizer, *FOUR)
    talk = run(config(), tokenizer, engine)
    first, second, third = heard(talk, tokenizer)
    assert first == "\n156\nAnswer:"
    assert second.startswith("\nerror: SyntaxError") and second.endswith("\n6\nAnswer:")
    assert third.startswith("\nerror: the call is not valid JSON")
    assert talk.facts == {"tool_calls": 4, "tool_errors": 2, "used_tools": 1}
    sample = talk.sample(prompt(tokenizer), 5)
    whole = [*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]
    for asked in engine.asked:
        assert whole[: len(asked)] == asked, "every request continues exactly what was said before"
    said = [tokenizer.encode(turn) + [tokenizer.eos_token_id] for turn in FOUR]
    assert sample.response_ids[sample.loss_mask].tolist() == sum(said, [])
    expected = np.concatenate([-0.01 * np.arange(1, len(turn) + 1) for turn in said])
    np.testing.assert_allclose(sample.log_probs[sample.loss_mask], expected, rtol=1e-6)
    assert set(sample.versions[sample.loss_mask]) == {3} and set(
        sample.versions[~sample.loss_mask]
    ) == {NOT_GENERATED}
    assert not sample.log_probs[~sample.loss_mask].any()
    assert sample.extra["agent"]["turns"] == 4 and sample.finish_reason == "stop"


def test_every_token_of_the_policy_is_checked_trained_or_not(tokenizer):
    sample = run(config(), tokenizer, Script(tokenizer, *FOUR)).sample(prompt(tokenizer), 0)
    batch = Batch(4, [sample], (0, 3))
    assert_staleness(batch)
    place, other = (
        int(np.flatnonzero(sample.loss_mask)[-1]),
        int(np.flatnonzero(~sample.loss_mask)[0]),
    )
    sample.versions[place], sample.loss_mask[place] = 2, False
    with pytest.raises(StalenessError, match=f"token {place}"):
        assert_staleness(batch)
    sample.versions[place], sample.loss_mask[place] = 3, True
    sample.loss_mask[other] = True  # nobody may train on what no weights made
    with pytest.raises(StalenessError, match=f"token {other}"):
        assert_staleness(batch)


def test_log_probs_of_a_conversation_are_those_of_one_forward_pass(tokenizer):
    """fp32. The engine is a stand-in made of the same model, asked turn by turn; then that once over the whole
    conversation. So this is about what the loop hands on; the real engine is in test_e2e_agent_loop.py."""
    import torch

    model = tiny_qwen.build_model("qwen2", tokenizer, 1)
    script, draw = Script(tokenizer, *FOUR), torch.Generator().manual_seed(0)

    def log_probs(ids: np.ndarray) -> torch.Tensor:
        with torch.no_grad():
            return torch.log_softmax(
                model(torch.tensor(ids[None], dtype=torch.long), use_cache=False).logits[0], -1
            )

    async def generate(ids, max_tokens):
        said = (await script(ids, max_tokens)).ids
        # Ids that the tokenizer itself would not make of this text: they must survive.
        noise = torch.randint(2, 300, (5,), generator=draw).numpy().astype(np.int32)
        said = np.concatenate([noise, said])
        rows = log_probs(np.concatenate([ids, said]))[len(ids) - 1 : -1]
        found = rows[torch.arange(len(said)), torch.tensor(said, dtype=torch.long)].numpy()
        return Generated(said, found, np.zeros(len(said), np.int32), 0, "stop")

    talk = run(config(), tokenizer, generate)
    sample = talk.sample(prompt(tokenizer), 0)
    assert talk.turns == 4
    whole = np.concatenate([sample.prompt_ids, sample.response_ids])
    rows = log_probs(whole)[len(sample.prompt_ids) - 1 : -1]
    once = rows[
        torch.arange(len(sample.response_ids)), torch.tensor(sample.response_ids, dtype=torch.long)
    ].numpy()
    difference = np.abs(once - sample.log_probs)[sample.loss_mask]
    assert difference.mean() < 1e-5 and difference.max() < 1e-4
    assert sample.loss_mask.sum() == 20 + sum(len(tokenizer.encode(turn)) + 1 for turn in FOUR)


def test_gae_goes_from_turn_to_turn_over_what_tools_said(tokenizer):
    sample = run(config(), tokenizer, Script(tokenizer, *FOUR)).sample(prompt(tokenizer), 0)
    mask, n = sample.loss_mask, len(sample.response_ids)
    values = np.random.default_rng(0).normal(size=n).astype(np.float32)
    wild = np.where(mask, values, 1e6).astype(
        np.float32
    )  # the critic's values of tool tokens must not matter
    gamma, lam = 0.9, 0.8
    found = estimate_advantages(
        "gae",
        Trajectories(np.array([1.0]), [0], [mask], values=[wild]),
        Options(gamma, lam, True),
        whiten=False,
    )[0][0]
    own, expected, after, following = values[mask].astype(float), [], 0.0, 0.0
    for t in reversed(range(len(own))):
        after = (t == len(own) - 1) + gamma * following - own[t] + gamma * lam * after
        following = own[t]
        expected.append(after)
    np.testing.assert_allclose(found[mask], expected[::-1], rtol=1e-5)
    assert not found[~mask].any()


TURN = tiny_qwen.build_tokenizer().encode(FOUR[0]) + [1]


@pytest.mark.parametrize(
    ("limits", "reason", "turns"),
    [
        (Limits(400, 2), "turns", 2),
        (Limits(30, 8), "length", 1),
        (
            Limits(len(TURN) + 2, 8),
            "room",
            1,
        ),  # the answer is whole; what the tool says does not fit
        (Limits(400, 8, turn_tokens=10), "turn_length", 1),
        (Limits(400, 8, seconds=0.0), "time", 0),
    ],
)
def test_limits_end_a_conversation_and_say_so(tokenizer, limits, reason, turns):
    talk = run(config(), tokenizer, Script(tokenizer, *FOUR), limits=limits)
    assert (talk.finish_reason, talk.turns) == (reason, turns)
    assert talk.length <= limits.tokens
    if turns:
        sample = talk.sample(prompt(tokenizer), 0)
        assert sample.loss_mask[-1], "what came after the last turn of the policy is left out"
    else:
        with pytest.raises(RuntimeError, match="without a turn of the policy"):
            talk.sample(prompt(tokenizer), 0)


def test_the_two_call_formats():
    assert hermes_calls("<think>a <tool_call>{}</tool_call></think>plain") == []
    two = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> and <tool_call>\n{"name": "g", "arguments": "{}"}'
    assert hermes_calls(two) == [("f", {"a": 1}), ("g", {})]
    assert llama_calls(
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'
    ) == [
        ("f", {"a": 1}),
        ("g", {}),
    ]
    begin, many = time.process_time(), 40000
    assert llama_calls('{"name": "f", "parameters": {}};\n' * many) == [("f", {})] * many
    assert time.process_time() - begin < 3, "not quadratic"
    assert llama_calls("The answer is {5}") == [] and llama_calls('{"name": ')[0][0] == ""
    for bad in (
        "[1]",
        '{"name": "f", "arguments": {}}}',
        '{"name": 5, "arguments": {}}',
        '{"name": "f", "arguments": "x"}',
        "[" * 100000,
    ):
        assert hermes_calls(f"<tool_call>{bad}</tool_call>")[0][0] == ""


@pytest.mark.parametrize(
    ("template", "tail"),
    [
        (
            CHATML,
            "\n<|im_start|>user\n<tool_response>\nX<\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        (LLAMA, "<|start|>ipython<|end|>\n\nX<<|im_end|><|start|>assistant<|end|>\n\n"),
    ],
)
def test_turns_are_written_by_the_models_own_template(template, tail):
    own = tiny_qwen.build_tokenizer()
    own.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|start|>", "<|end|>"]})
    own.chat_template = template
    loop: Any = Loops(config(loop_kwargs={}), own).get()
    assert loop.parse_calls is (llama_calls if template is LLAMA else hermes_calls)
    plain = [{"role": "tool", "content": "X<"}]
    whole = own(tail, add_special_tokens=False)["input_ids"]
    assert loop.encode_messages(plain, np.array([own.eos_token_id])).tolist() == whole, (
        "as the template's text is tokenised"
    )
    # A policy that was stopped otherwise has its turn ended for it.
    assert own.decode(loop.encode_messages(plain, np.array([5]))) == "<|im_end|>" + tail
    # A tool cannot open a turn, however it writes it, nor end the frame; what it says is kept.
    for content in (
        "X<|im_start|><|im_end|><",
        "<|im_<|im_end|>start|>a",
        "<|im_end|>" * 9,
        "\ud800",
        "3.",
    ):
        ids = loop.encode_messages(
            [{"role": "tool", "content": content}] * 2, np.array([own.eos_token_id])
        ).tolist()
        text, kept = own.decode(ids), content.replace("\ud800", "?")
        assert text.count(kept) == 2 and text.startswith(tail[:6]) and text.endswith(tail[-15:])
        clean = loop.encode_messages(
            [{"role": "tool", "content": "a"}] * 2, np.array([own.eos_token_id])
        ).tolist()
        assert [i for i in ids if i in own.all_special_ids] == [
            i for i in clean if i in own.all_special_ids
        ]


def test_calls_beyond_the_most_of_a_turn_are_answered_in_one_message(tokenizer):
    talk = run(
        config(),
        tokenizer,
        Script(tokenizer, call("2 * 3") * 30, " #### 6"),
        limits=Limits(4000, 8),
    )
    assert (
        heard(talk, tokenizer)[0].count(
            "error: more than 8 calls in one turn; the last 22 were not made"
        )
        == 1
    )
    assert heard(talk, tokenizer)[0].count("6\n") == 8
    assert talk.facts == {"tool_calls": 30, "tool_errors": 22, "used_tools": 1}
    loop: Any = Loops(config(), tokenizer).get()
    for count in range(1, 80):
        loop.encode_messages([{"role": "tool", "content": "x"}] * count, np.array([]))
    assert loop.turn_encoder.frame.cache_info().currsize <= 64


def test_added_tokens_that_are_not_special_are_kept():
    """Some tokenizers have runs of blanks as added tokens."""
    own = tiny_qwen.build_tokenizer()
    own.add_tokens(["    "])
    loop = Loops(config(), own).get()
    assert "if x:\n    y" in own.decode(
        loop.encode_messages([{"role": "tool", "content": "if x:\n    y"}], np.array([]))
    )


def test_a_model_whose_calls_no_text_shows_is_refused():
    own = tiny_qwen.build_tokenizer()
    own.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
    with pytest.raises(ConfigError, match="<tool_call> is a special token"):
        Loops(config(), own).get()


MISSES_ALL_BUT_THE_LAST = "{% if m['role'] == 'tool' and not loop.last %}{% continue %}{% endif %}"
REFUSES_TWO = "{% if messages | length > 3 %}{{ raise_exception('no') }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (CHATML.replace("\n{{ m['content'] }}", ""), "does not show messages of 'tool'"),
        (
            CHATML.replace("{{ m['content'] }}", "{{ m['content'] }}{{ m['content'] }}"),
            "does not show messages of 'tool'",
        ),
        (
            CHATML.replace("%}", "%}" + MISSES_ALL_BUT_THE_LAST, 1),
            "does not show 2 messages in a row of 'tool'",
        ),
        (
            CHATML.replace("{% for", REFUSES_TWO + "{% for", 1),
            "does not take 'tool': TemplateError: no",
        ),
        (CHATML.replace("{{ tools | tojson }}", ""), "does not write the tools into prompts"),
        (
            CHATML.replace("{{ tools | tojson }}", "{{ raise_exception('no') }}"),
            "does not take the tools: TemplateError: no",
        ),
    ],
)
def test_a_template_from_which_the_model_learns_nothing_of_tools_is_refused(template, words):
    own = tiny_qwen.build_tokenizer()
    own.chat_template = template
    with pytest.raises(ConfigError, match=words):
        Loops(config(loop_kwargs={}), own).get()


def test_a_template_that_hides_what_was_said_is_refused(tokenizer):
    own = tiny_qwen.build_tokenizer()
    own.chat_template = (
        "{% for m in messages if m['role'] != 'assistant' %}{{ m['content'] }}{% endfor %}"
    )
    with pytest.raises(ConfigError, match="does not show the assistant's turn once"):
        Loops(config(), own).get()


def test_tries_until_the_verifier_is_content(tokenizer):
    async def score(response: str) -> Reward | None:
        return Reward.of({"right": float("156" in response), "form": 0.25})

    cfg = config(
        loop="retry_with_feedback",
        loop_kwargs={"retry_with_feedback": {"discount": 0.5, "feedback": "No."}},
    )
    talk = run(cfg, tokenizer, Script(tokenizer, " 155", " 157", " 156"), score)
    assert isinstance(talk.reward, Reward)
    assert (
        talk.reward.parts == {"right": 0.25, "form": 0.0625}
        and talk.reward.total == 0.3125
        and talk.turns == talk.facts["tries"] == 3
    )
    assert heard(talk, tokenizer) == ["\nQuestion: No.\nAnswer:"] * 2
    reward = run(cfg, tokenizer, Script(tokenizer, " 1", " 2"), score, Limits(400, 2)).reward
    assert isinstance(reward, Reward) and reward.parts["right"] == 0.0


def test_a_puzzle_of_reasoning_gym(tokenizer):
    from agent_loop.environment import Puzzle

    rows, test = make_puzzles("train", 40, 0), make_puzzles("test", 40, 0)
    truth = rows[3]["reward_model"]["ground_truth"]
    assert not {r["prompt"][0]["content"] for r in rows} & {r["prompt"][0]["content"] for r in test}
    puzzle = Puzzle()
    assert puzzle.reset(truth) == rows[3]["prompt"][0]["content"]
    answer, engine = puzzle.entry["answer"], Script(tokenizer, " 0", " nothing", " 1", " 2")
    talk = run(config(loop="environment"), tokenizer, engine, truth=truth)
    assert talk.turns == talk.facts["steps"] == 3 and 0 <= talk.reward < 1
    talk = run(
        config(loop="environment"),
        tokenizer,
        Script(tokenizer, " 0", f" {answer}", " 1"),
        truth=truth,
    )
    assert talk.turns == 2 and talk.reward == pytest.approx(1.0), (
        "the best guess counts, and ends it"
    )


def moody(tokenizer, *turns: str, truth: str = "good") -> Trajectory:
    name = "tests.environments:Moody"
    cfg = config(loop="environment", tool_timeout_s=1.0, loop_kwargs={"environment": {"env": name}})
    return run(cfg, tokenizer, Script(tokenizer, *turns), truth=truth)


@pytest.mark.parametrize("how", ["sleep", "spin", "die"])
def test_a_step_that_never_ends_is_killed_and_ends_its_episode_alone(tokenizer, how):
    begin = time.perf_counter()
    talk = moody(tokenizer, " x", f" {how}", " x")
    assert talk.reward == 0.5 and talk.facts == {"steps": 2, "lost_steps": 1}
    assert time.perf_counter() - begin < 30


def test_an_environment_of_ones_own(tokenizer):
    talk = moody(tokenizer, " x", " end", " x")
    assert (
        talk.reward == 1.0
        and talk.facts == {"steps": 2}
        and heard(talk, tokenizer) == ["\nQuestion: x\nAnswer:"]
    )
    for how, words in (
        ("raise", "Moody.step: KeyError: 'mood'"),
        ("nan", "returned .*nan, False., not .* a finite number"),
    ):
        with pytest.raises(RuntimeError, match=words):
            moody(tokenizer, f" {how}")


@pytest.mark.parametrize(
    ("guess", "lost"),
    [("9**9**9**9", 1), ("__import__('os').system('touch /tmp/one_step_off_escaped')", 0)]
    + [("__import__('os')._exit(1)", 1), ("__import__('os').write(3, b'nope\\n')", 1)],
)
def test_a_guess_that_is_code_harms_nobody(tokenizer, guess, lost):
    truth = make_puzzles("train", 1, 0)[0]["reward_model"]["ground_truth"]
    assert "countdown" in truth
    cfg = config(loop="environment", tool_timeout_s=3.0)

    async def main() -> tuple[Trajectory, float]:
        engine, late = Script(tokenizer, f" {guess}", " 1", " 2"), 0.0
        talk = asyncio.create_task(
            Loops(cfg, tokenizer).get().run(prompt(tokenizer, truth=truth), engine, None, USUAL)
        )
        while not talk.done():
            begin = time.perf_counter()
            await asyncio.sleep(0.01)
            late = max(late, time.perf_counter() - begin)
        return await talk, late

    talk, late = asyncio.run(main())
    assert talk.reward < 0.1 and late < 2 and not Path("/tmp/one_step_off_escaped").exists()
    assert talk.facts.get("lost_steps", 0) == lost


def test_many_confined_episodes_at_once_are_in_time(tokenizer):
    """Resets that take a quarter of a second of a core each: one after the other, each within its second."""
    name = "tests.environments:Busy"
    cfg = config(loop="environment", tool_timeout_s=2.0, loop_kwargs={"environment": {"env": name}})
    loop = Loops(cfg, tokenizer).get()

    async def everyone() -> list[Trajectory]:
        ask = prompt(tokenizer)
        return await asyncio.gather(
            *(loop.run(ask, Script(tokenizer, " end"), None, USUAL) for _ in range(24))
        )

    assert [talk.reward for talk in asyncio.run(everyone())] == [1.0] * 24


def test_rows_that_an_environment_does_not_take_are_told_before_engines_start(tokenizer):
    loop = Loops(config(loop="environment"), tokenizer).get()
    asyncio.run(loop.check(prompt(tokenizer, truth='{"dataset": "countdown", "seed": 2}')))
    with pytest.raises(
        ConfigError, match="Puzzle does not begin with the ground truth '156'.*AttributeError"
    ):
        asyncio.run(loop.check(prompt(tokenizer)))


@pytest.mark.parametrize("loop", ["tool", "retry_with_feedback", "environment"])
def test_loops_with_turns_need_a_chat_template(tokenizer, loop):
    bare, refusing, cfg = (
        tiny_qwen.build_tokenizer(),
        tiny_qwen.build_tokenizer(),
        config(loop=loop),
    )
    bare.chat_template = None
    refusing.chat_template = (
        "{{ raise_exception('no') if messages | length > 2 }}{{ messages[1]['content'] }}"
    )
    for own, words in (
        (bare, "has turns, which a chat template writes"),
        (refusing, "does not take '(tool|user)': TemplateError: no"),
    ):
        with pytest.raises(ConfigError, match=words):
            Loops(cfg, own).get()
    cfg.data.chat_template = "never"
    with pytest.raises(ConfigError, match="data.chat_template=never"):
        Loops(cfg, tokenizer).get()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loop": "nothing"}, "agent.loop='nothing': unknown; use module:Class or one of"),
        ({"loop": "json:dumps"}, "agent.loop='json:dumps': is no agent loop; name a class"),
        ({"loop_kwargs": {"tool": {"colour": 1}}}, "colour"),
        ({"loop_kwargs": {"tool": {"format": "xml"}}}, "format='xml'"),
        ({"tools": ""}, "agent.tools names none"),
        ({"tools": "json:dumps"}, "no JSON schema can be made"),
        ({"tools": "json:nothing"}, "agent.tools='json:nothing'"),
    ],
)
def test_a_loop_that_does_not_fit_is_told_before_engines_start(tokenizer, changes, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        Loops(config(**changes), tokenizer).get()


def test_the_config_of_the_example_answers_by_tool_within_its_limits():
    tokenizer = tiny_qwen.build_tokenizer("tools")
    cfg = load_config([f"config={Path(__file__).parents[3] / 'config' / 'tool_agent.yaml'}"])
    assert cfg.agent.tools == "calculator" and cfg.reward.function == "gsm8k"
    loops = Loops(cfg, tokenizer)
    row = make_products("train", 1, 0)[0]
    limits = loops.limits(cfg.data.max_response_length)
    engine = Script(tokenizer, call("99 * 99"), " 99 * 99 = 9801\n#### 9801")
    asked = prompt(tokenizer, row["question"])
    talk = asyncio.run(loops.get().run(asked, engine, None, limits))
    assert (talk.turns, talk.finish_reason, talk.facts["tool_errors"]) == (2, "stop", 0)
    assert (
        heard(talk, tokenizer) == ["\n9801\nAnswer:"]
        and len(asked.ids) <= cfg.data.max_prompt_length
    )


def test_the_names_in_the_config_checks_are_those_that_exist():
    from agent_loop import base, tools

    assert set(BUILT_IN_LOOPS) == set(base.LOOPS) and set(BUILT_IN_TOOLS) == set(tools.BUILT_IN)


def test_the_loop_of_the_page_runs(tokenizer, tmp_path, monkeypatch):
    """docs/tutorials/your_own_agent.md shows a loop of at most 20 lines; it is the one that runs here, with the keys of the page."""
    page = (Path(__file__).parents[3] / "docs/tutorials/your_own_agent.md").read_text()
    code = next(m[1] for m in re.finditer(r"```python\n(# my_loop.py\n.*?)```", page, re.S))
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    (tmp_path / "my_loop.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))

    async def score(response: str) -> float:
        return float("#### 156" in response)

    words = shlex.split(re.search(r"^python -m .*agent.loop=my_loop.*$", page, re.M)[0])
    for question, keys in (("Are you sure?", 1), ("Really?", 2)):
        given = [word for word in words if word.startswith("agent.")][:keys]
        cfg = load_config([*given, "data.train_files=generator:word_problems"])
        talk = run(cfg, tokenizer, Script(tokenizer, " #### 155", " #### 156"), score)
        assert talk.turns == 2 and talk.facts == {"changed": 1}
        assert heard(talk, tokenizer) == [f"\nQuestion: {question}\nAnswer:"]
    sys.modules.pop("my_loop")


def test_500_conversations_at_once_cost_little(tokenizer):
    """Through a replica, with places, reward queue and judging; uneven lengths, and an engine that takes its time."""
    rng = random.Random(0)
    lengths = [rng.randrange(0, 12) for _ in range(500)]
    engine = StandInEngine(tokenizer, lengths, slots=64, token_s=5e-4)
    cost = serve_through_loop(engine, tokenizer, reward_workers=4, reward_s=0.0)["cpu_ms_per_turn"]
    assert engine.requests == sum(lengths) + len(lengths)
    print(f"{cost:.2f} ms of CPU per turn")
    assert cost < 5, "CPU time, and some times what a quiet machine needs"
