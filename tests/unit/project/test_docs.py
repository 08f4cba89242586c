"""The documentation as a user takes it: every config, command, key and path in it is valid."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from one_step_off.config import unknown_keys
from one_step_off.config import validation as config_checks
from one_step_off.config.loading import KEYS, SECTIONS, find_key, load_config
from one_step_off.config.schema import Config, ConfigError
from one_step_off.main_ppo import FLAGS
from one_step_off.monitoring.tracker import speed
from one_step_off.runtime.validation import validate

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ids = {"ids": lambda p: p.name if isinstance(p, Path) else None}
GPUS = 8  # of this machine, as it is pretended

# What the scripts give the program before the user's arguments.
SCRIPTS = {
    "shell/run_qwen_gsm8k.sh": ("config=config/qwen_gsm8k_fsdp.yaml",),
    "shell/run_dapo_7b_4x12.sh": ("config=config/dapo_7b.yaml",),
    "shell/slurm_qwen_gsm8k.sh": ("config=config/qwen_gsm8k_fsdp.yaml",),
}


def fences(page: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of each fenced block."""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S):
        yield match[1], match[2]


def blocks(language: str) -> list[Any]:
    """All blocks of a language, as parameters named by page and number."""
    return [
        pytest.param(text, id=f"{page.name}-{i}")
        for page in PAGES
        for i, (of, text) in enumerate(fences(page))
        if of == language
    ]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the modules that the pages show, where a user would start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    for page in PAGES:
        for language, text in fences(page):
            name = re.match(r"# (\w+\.py)\n", text)
            if language == "python" and name:
                (tmp_path / name[1]).write_text(text)
    return tmp_path


def check(cfg: Config) -> None:
    """Validate, after making the data files that the config names."""
    for source in f"{cfg.data.train_files},{cfg.data.val_files}".split(","):
        if source.endswith((".jsonl", ".parquet")):
            Path(source).parent.mkdir(parents=True, exist_ok=True)
            Path(source).write_text("{}\n")
    with pytest.MonkeyPatch.context() as patch:
        if any(len(shape) > 1 for shape in cfg.placement.pools.values()):
            patch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # several nodes need a cluster
        validate(cfg, GPUS)


def over(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A mapping with some entries changed, mappings in it likewise."""
    result = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = over(result[key], value) if both else value
    return result


@pytest.mark.parametrize("text", blocks("yaml"))
def test_configs(text: str, workplace: Path) -> None:
    content, base = yaml.safe_load(text), re.match(r"# over (\S+)\n", text)
    if base:
        content = over(yaml.safe_load((ROOT / base[1]).read_text()), content)
    path = workplace / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    check(load_config([f"config={path}"]))
    # The block itself too: keys must not stand twice, and numbers must be numbers.
    path.write_text(text)
    load_config([f"config={path}"])


def commands(text: str) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Each command: the variables set in front of it, and its words."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        variables = {}
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        if words:
            yield variables, words


def overrides(words: list[str]) -> list[str] | None:
    """The arguments of load that a command means, or None for one without a config or with a mere placeholder."""
    if "config=FILE" in words:
        return None
    words = [w for w in words if not w.startswith(("[", "...]"))]
    if "one_step_off.main_ppo" in words:
        rest = words[words.index("one_step_off.main_ppo") + 1 :]
    else:
        script = next((w for w in words if w in SCRIPTS), None)
        if script is None:
            return None
        rest = [*SCRIPTS[script], *words[words.index(script) + 1 :]]
    assert not [w for w in rest if w.startswith("-") and w not in FLAGS], words
    rest = [
        w
        for before, w in zip(["", *rest], rest, strict=False)
        if before not in ("--replay", "--profile")
    ]
    return [re.sub(r"^config=(?=\w)", f"config={ROOT}/", w) for w in rest if w not in FLAGS]


@pytest.mark.parametrize("page", PAGES, **ids)
def test_commands(page: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some pages show commands in indented blocks.
    text = re.sub(r"\\\n +", " ", page.read_text())
    indented = [
        m[1] for m in re.finditer(r"^ {4}((?:[A-Z_]+=\S* )*(?:bash|sbatch|python) .*)$", text, re.M)
    ]
    shown = [text for language, text in fences(page) if language == "bash"]
    for variables, words in commands("\n".join([*shown, *indented])):
        for word in words:
            if re.fullmatch(r"(shell|docs|config|docker)/\S+", word):
                assert (ROOT / word).exists(), word
        argv = overrides(words)
        if argv:
            with monkeypatch.context() as patch:
                if variables.get("BACKEND") == "megatron":
                    argv[0] = f"config={ROOT}/config/qwen_gsm8k_megatron.yaml"
                    patch.setattr(config_checks, "is_installed", lambda package: True)
                if "RAY_ADDRESS" in variables:
                    patch.setenv("RAY_ADDRESS", variables["RAY_ADDRESS"])
                check(load_config(argv))


def code_spans(page: Path) -> Iterator[str]:
    """Inline code, without the left columns of the pages that hold other projects' keys there."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for line in text.splitlines():
        if page.name.startswith("from_") and line.startswith("|"):
            line = re.sub(r"^\|.*?\|", "", line)
        if not line.startswith("    "):
            yield from re.findall(r"`([^`]+)`", line)


NOT_KEYS = ("actor.update",)  # a method of the worker


@pytest.mark.parametrize("page", PAGES, **ids)
def test_keys_in_the_text_exist(page: Path) -> None:
    for code in code_spans(page):
        name, equals, value = code.partition("=")
        section, dot, rest = name.partition(".")
        if (
            section not in SECTIONS
            or not dot
            or not re.fullmatch(r"[\w.]+", rest)
            or rest == "py"
            or name in NOT_KEYS
        ):
            continue
        known = find_key(".".join(name.split(".")[:2]))
        if not equals:
            assert known.dotted == name or known.type is dict or "dict" in str(known.type), code
            continue
        try:
            validate(run_with(code), GPUS)
        except ConfigError as e:
            # A value that the page says is refused, or a key that needs another beside it; never a faulty one.
            assert not re.search("not valid YAML|unknown|must be (a\b|true|text|one of)", str(e)), (
                f"{code}: {e}"
            )


def run_with(*overrides: str) -> Config:
    """A valid config of a GPU run with these changes."""
    fixed = (
        "model.path=tiny:qwen2",
        "data.train_files=generator:word_problems",
        "trainer.total_steps=1",
    )
    return load_config([*fixed, "placement.device=cuda", *overrides])


@pytest.mark.parametrize("page", PAGES, **ids)
def test_paths_in_the_text_exist(page: Path) -> None:
    for code in code_spans(page):
        for path in re.findall(
            r"\b((?:shell|config|docs|docker|one_step_off|agent_loop)/[\w./-]+\w)", code
        ):
            if "*" not in code and "verl" not in code:
                assert (ROOT / path).exists(), f"{page.name}: {path}"


@pytest.mark.parametrize("text", blocks("python"))
def test_python(text: str, workplace: Path) -> None:
    compile(text, "page", "exec")


def test_reward_functions_do_what_the_pages_say(workplace: Path) -> None:
    from one_step_off.config.schema import RewardConfig
    from one_step_off.rewards.scoring import RewardItem, Scorer

    def score(function: str, response: str, **kwargs: Any) -> float:
        return Scorer(RewardConfig(function, 5.0, kwargs)).score_batch(
            [RewardItem((0, 0), 0, "?", response, "7")]
        )[0]

    assert score("my_rewards:short_and_right", "it is 7.") == 1.0
    assert score("my_rewards:short_and_right", "it is 7.", limit=2) == 0.9
    assert score("trl_style:score", "it is 7") == 1.0 and score("trl_style:score", "it is 8") == 0.0


def test_data_rows_do_what_the_pages_say(workplace: Path) -> None:
    from one_step_off.config.schema import DataConfig
    from one_step_off.data.prompt_stream import Report, load_rows

    texts = [text for page in PAGES for language, text in fences(page) if language == "json"]
    truths = []
    for i, text in enumerate(texts):
        json.loads(text)
        (workplace / f"{i}.jsonl").write_text(text)
        truths += [
            row.ground_truth
            for row in load_rows(
                f"{i}.jsonl", "train", DataConfig(bad_rows="fail"), 0, Report("data")
            )
        ]
    assert truths == ["7", "7"]


def make_reference() -> Any:
    """docs/make_reference.py as a module."""
    spec = importlib.util.spec_from_file_location(
        "make_reference", ROOT / "docs" / "make_reference.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_current() -> None:
    module = make_reference()
    assert module.PAGE.read_text() == module.page(), "run: python docs/make_reference.py"
    for key in KEYS:
        assert f"| `{key}` |" in module.page()


def test_the_tables_of_other_trainers_keys_are_current() -> None:
    """What an unknown key is answered with is what the page says."""
    module = make_reference()
    for path in module.TABLED:
        text = path.read_text()
        assert text == module.with_tables(text), "run: python docs/make_reference.py"
        shown = {(m[2], m[3]) for m in module.TABLE.finditer(text)}
        trainer = next(
            name for name, page in unknown_keys.PAGES.items() if page.endswith(path.name)
        )
        assert shown == {
            (row.trainer, row.table) for row in unknown_keys.rows() if row.trainer == trainer
        }


def test_no_key_of_another_trainer_is_said_to_be_the_same_unless_it_is() -> None:
    for row in unknown_keys.rows():
        for key, _ in row.keys:
            ours_too = key in KEYS
            assert ours_too == row.here.startswith("the same"), key


def test_every_page_is_in_the_navigation() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    sections = [pages for entry in nav for pages in entry.values()]
    listed = [
        page
        for pages in sections
        if isinstance(pages, list)
        for entry in pages
        for page in entry.values()
    ]
    listed += [page for page in sections if isinstance(page, str)]
    assert sorted(listed) == sorted(
        str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")
    )


PLACEHOLDERS = {
    "GROUP": "(rollout|trainer)",
    "ROLE": "(actor|critic)",
    "WORKER": "(rollout|sync|actor|critic|ref|reward_model)",
    "SET": r"val(/\w+)?",
}


def described_metrics() -> list[re.Pattern[str]]:
    """The first column of the tables of docs/reference/metrics.md. Words in capitals stand for names."""
    page = (ROOT / "docs/reference/metrics.md").read_text()
    first_columns = re.findall(r"^\|((?: `[^`|]+`,?)+) \|", page, re.M)
    names = re.findall(r"`([^`]+)`", " ".join(first_columns))

    def values_of(placeholder: re.Match[str]) -> str:
        return PLACEHOLDERS.get(placeholder[0], r"\w+")

    return [re.compile(re.sub("[A-Z]+", values_of, name)) for name in names]


def test_every_metric_of_a_row_and_of_a_summary_is_described() -> None:
    row = json.loads((ROOT / "tests/a_row.json").read_text())
    summary = {"steps", "seconds", *speed([row, row])}
    patterns = described_metrics()
    missing = [
        name
        for name in [*row, *summary]
        if not any(pattern.fullmatch(name) for pattern in patterns)
    ]
    assert not missing, "describe them in docs/reference/metrics.md"


def test_links_of_readme_and_contributing() -> None:
    for page in PAGES[:2]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (ROOT / target).exists(), f"{page.name}: {target}"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert not list((tmp_path / "site").rglob("*.py"))
    assert "actor.lr" in (tmp_path / "site" / "reference" / "config" / "index.html").read_text()


def test_every_room_stands_in_the_architecture():
    page = (ROOT / "docs/concepts/architecture.md").read_text()
    rooms = [
        path.name for path in (ROOT / "one_step_off").rglob("*.py") if path.name != "__init__.py"
    ]
    assert not [name for name in rooms if f"`{name}`" not in page]
