"""Every config, command, key, path and metric in the documentation is valid."""

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

from one_step_off.config import packages, unknown_keys
from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import FLAGS, KEYS, SECTIONS, find_key, load_config
from one_step_off.config.schema import Config
from one_step_off.config.sections.data import train_sources
from one_step_off.monitoring.summary import speed_summary
from one_step_off.runtime.validation import validate, validate_supervised

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
GPUS = 8  # that this machine is assumed to have

# The arguments that a script gives the program before those of the user.
SCRIPTS = {
    "shell/run_qwen_gsm8k.sh": ("config=config/qwen_gsm8k_fsdp.yaml",),
    "shell/run_dapo_7b_4x12.sh": ("config=config/dapo_7b.yaml",),
    "shell/slurm_qwen_gsm8k.sh": ("config=config/qwen_gsm8k_fsdp.yaml",),
}


def page_id(page: Path) -> str:
    """The name of a page in the names of tests."""
    return str(page.relative_to(ROOT).with_suffix(""))


def fences(page: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of each fenced block."""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S):
        yield match[1], match[2]


def blocks(language: str) -> list[Any]:
    """All blocks of a language, as parameters named by page and number."""
    parameters = []
    for page in PAGES:
        for number, (block_language, text) in enumerate(fences(page)):
            if block_language == language:
                parameters.append(pytest.param(text, id=f"{page_id(page)}-{number}"))
    return parameters


@pytest.fixture
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user, with the modules that the pages show."""
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
    """Validate the config, after creating the data files that it names, and the models that an
    earlier run has written."""
    for path in (cfg.model.path, cfg.teacher.path):
        if path.startswith("outputs/"):
            for name in ("config.json", "tokenizer.json", "model.safetensors"):
                Path(path).mkdir(parents=True, exist_ok=True)
                (Path(path) / name).touch()
    sources = train_sources(cfg.data.train_files)
    files = [source.files for source in sources] or [cfg.data.train_files]
    for source in ",".join([*files, cfg.data.val_files, *cfg.data.val_sets.values()]).split(","):
        if source.endswith((".jsonl", ".parquet")):
            Path(source).parent.mkdir(parents=True, exist_ok=True)
            Path(source).write_text("{}\n")
    if cfg.model.path.endswith("/hf_model"):  # of a run that the page shows before
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            Path(cfg.model.path).mkdir(parents=True, exist_ok=True)
            (Path(cfg.model.path) / name).touch()
    with pytest.MonkeyPatch.context() as patch:
        if any(len(shape) > 1 for shape in cfg.placement.pools.values()):
            patch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # several nodes need a cluster
        # The configs of supervised runs have no role rollout.
        is_supervised = "rollout" not in cfg.placement.roles
        check_run = validate_supervised if is_supervised else validate
        check_run(cfg, GPUS)


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The base with changed entries. Mappings inside it are merged too."""
    result = dict(base)
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


@pytest.mark.parametrize("text", blocks("yaml"))
def test_configs(text: str, working_directory: Path) -> None:
    content = yaml.safe_load(text)
    base = re.match(r"# over (\S+)\n", text)
    if base:
        content = merged(yaml.safe_load((ROOT / base[1]).read_text()), content)
    path = working_directory / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    check(load_config([f"config={path}"]))
    # The block itself too, which safe_load is more tolerant of: duplicate keys, numbers that are
    # text.
    path.write_text(text)
    load_config([f"config={path}"])


def commands(text: str) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Each command: the variables set before it, and its words."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        variables = {}
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        if words:
            yield variables, words


def arguments_of(words: list[str]) -> list[str]:
    """The arguments of a call of the program or of one of SCRIPTS; none for another command."""
    words = [word for word in words if not word.startswith(("[", "...]"))]
    for program in ("one_step_off.main_ppo", "one_step_off.main_sft"):
        if program in words:
            return words[words.index(program) + 1 :]
    for script, first_arguments in SCRIPTS.items():
        if script in words:
            return [*first_arguments, *words[words.index(script) + 1 :]]
    return []


def overrides(words: list[str]) -> list[str]:
    """What a command gives `load_config`; nothing for one without a config of its own."""
    arguments = arguments_of(words)
    if "config=FILE" in arguments:
        return []
    unknown_flags = [word for word in arguments if word.startswith("-") and word not in FLAGS]
    assert not unknown_flags, words
    found = []
    previous = ""
    for word in arguments:
        is_value_of_flag = previous in ("--replay", "--profile")
        if word not in FLAGS and not is_value_of_flag:
            found.append(re.sub(r"^config=(?=\w)", f"config={ROOT}/", word))
        previous = word
    return found


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands(page: Path, working_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = re.sub(r"\\\n +", " ", page.read_text())
    command_in_indented_block = r"^ {4}((?:[A-Z_]+=\S* )*(?:bash|sbatch|python) .*)$"
    indented = [match[1] for match in re.finditer(command_in_indented_block, text, re.M)]
    fenced = [text for language, text in fences(page) if language == "bash"]
    for variables, words in commands("\n".join([*fenced, *indented])):
        for word in words:
            if re.fullmatch(r"(shell|docs|config|docker)/\S+", word):
                assert (ROOT / word).exists(), word
        arguments = overrides(words)
        if not arguments:
            continue
        with monkeypatch.context() as patch:
            if variables.get("BACKEND") == "megatron":
                arguments[0] = f"config={ROOT}/config/qwen_gsm8k_megatron.yaml"
                patch.setattr(packages, "is_installed", lambda package: True)
            if "RAY_ADDRESS" in variables:
                patch.setenv("RAY_ADDRESS", variables["RAY_ADDRESS"])
            check(load_config(arguments))


def code_spans(page: Path) -> Iterator[str]:
    """Inline code, without the left columns of the pages that hold other projects' keys there."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for line in text.splitlines():
        if page.name.startswith("from_") and line.startswith("|"):
            line = re.sub(r"^\|.*?\|", "", line)
        if not line.startswith("    "):
            yield from re.findall(r"`([^`]+)`", line)


NOT_KEYS = ("actor.update",)  # a method of the worker


def is_key(name: str) -> bool:
    """Whether a page means a config key by this name."""
    section, dot, rest = name.partition(".")
    is_file = rest == "py"
    is_name = bool(dot) and bool(re.fullmatch(r"[\w.]+", rest))
    return section in SECTIONS and is_name and not is_file and name not in NOT_KEYS


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_keys_in_the_text_exist(page: Path) -> None:
    for code in code_spans(page):
        name, equals, _ = code.partition("=")
        if not is_key(name):
            continue
        known = find_key(".".join(name.split(".")[:2]))
        if not equals:
            assert known.dotted == name or known.type is dict or "dict" in str(known.type), code
            continue
        try:
            validate(run_with(code), GPUS)
        except ConfigError as e:
            # The page may show a value that is refused, or a key that needs another one. It may not
            # show one of the wrong type.
            wrong_type = r"not valid YAML|unknown|must be (a\b|true|text|one of)"
            assert not re.search(wrong_type, str(e)), f"{code}: {e}"


def run_with(*overrides: str) -> Config:
    """A valid config of a GPU run with these changes."""
    fixed = (
        "model.path=tiny:qwen2",
        "data.train_files=generator:word_problems",
        "trainer.total_steps=1",
    )
    return load_config([*fixed, "placement.device=cuda", *overrides])


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_paths_in_the_text_exist(page: Path) -> None:
    own_path = r"\b((?:shell|config|docs|docker|one_step_off|agent_loop)/[\w./-]+\w)"
    for code in code_spans(page):
        if "*" in code or "verl" in code:
            continue
        for path in re.findall(own_path, code):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


@pytest.mark.parametrize("text", blocks("python"))
def test_python(text: str, working_directory: Path) -> None:
    compile(text, "page", "exec")


def test_reward_functions_do_what_the_pages_say(working_directory: Path) -> None:
    from one_step_off.config.schema import RewardConfig
    from one_step_off.rewards.reward import RewardItem
    from one_step_off.rewards.scoring import Scorer

    def score(function: str, response: str, **kwargs: Any) -> float:
        scorer = Scorer(RewardConfig(function, 5.0, kwargs))
        return scorer.score_batch([RewardItem((0, 0), 0, "?", response, "7")])[0]

    assert score("my_rewards:short_and_right", "it is 7.") == 1.0
    assert score("my_rewards:short_and_right", "it is 7.", limit=2) == 0.9
    assert score("trl_style:score", "it is 7") == 1.0
    assert score("trl_style:score", "it is 8") == 0.0


def test_data_rows_do_what_the_pages_say(working_directory: Path) -> None:
    from one_step_off.config.schema import DataConfig
    from one_step_off.data.rows import DataReport, load_rows

    texts = [text for page in PAGES for language, text in fences(page) if language == "json"]
    ground_truths = []
    for i, text in enumerate(texts):
        json.loads(text)
        (working_directory / f"{i}.jsonl").write_text(text)
        rows = load_rows(f"{i}.jsonl", "train", DataConfig(bad_rows="fail"), 0, DataReport("data"))
        ground_truths += [row.ground_truth for row in rows]
    assert ground_truths == ["7", "7", "7"]


def docs_module(name: str) -> Any:
    """docs/NAME.py as a module."""
    path = ROOT / "docs" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_current() -> None:
    module = docs_module("make_reference")
    generated = module.pages()
    for path, text in generated.items():
        assert path.read_text() == text, "run: python docs/make_reference.py"
    on_disk = {module.REFERENCE / "config.md", *(module.REFERENCE / "config").glob("*.md")}
    assert on_disk == set(generated), "run: python docs/make_reference.py"
    for key, entry in KEYS.items():
        assert f"| `{key}` |" in generated[module.REFERENCE / "config" / f"{entry.section}.md"]


def test_the_tables_of_other_trainers_keys_are_current() -> None:
    """The error message of an unknown key says the same as the page."""
    module = docs_module("make_reference")
    for path in module.TABLED:
        text = path.read_text()
        assert text == module.with_tables(text), "run: python docs/make_reference.py"
        shown = {(m[2], m[3]) for m in module.TABLE.finditer(text)}
        pages = {Path(page).name: trainer for trainer, page in unknown_keys.PAGES.items()}
        rows = [row for row in unknown_keys.rows() if row.trainer == pages[path.name]]
        assert shown == {(row.trainer, row.table) for row in rows}


def test_no_key_of_another_trainer_is_said_to_be_the_same_unless_it_is() -> None:
    for row in unknown_keys.rows():
        for key, _ in row.keys:
            ours_too = key in KEYS
            assert ours_too == row.here.startswith("the same"), key


def pages_of(entries: list[dict[str, Any]]) -> Iterator[str]:
    """The pages of a part of the navigation."""
    for entry in entries:
        for page_or_section in entry.values():
            if isinstance(page_or_section, str):
                yield page_or_section
            else:
                yield from pages_of(page_or_section)


def test_every_page_is_in_the_navigation() -> None:
    listed = list(pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    pages = (ROOT / "docs").rglob("*.md")
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in pages)


PLACEHOLDERS = {
    "GROUP": "(rollout|trainer)",
    "ROLE": "(actor|critic)",
    "WORKER": "(rollout|sync|actor|critic|ref|reward_model)",
    "SET": r"val(/\w+)?",
}


def described_metrics() -> list[re.Pattern[str]]:
    """The first column of the tables of docs/reference/metrics*.md. Words in capitals stand for
    names.
    """
    pages = sorted((ROOT / "docs/reference").glob("metrics*.md"))
    page = "\n".join(path.read_text() for path in pages)
    first_columns = re.findall(r"^\|((?: `[^`|]+`,?)+) \|", page, re.M)
    names = re.findall(r"`([^`]+)`", " ".join(first_columns))

    def values_of(placeholder: re.Match[str]) -> str:
        return PLACEHOLDERS.get(placeholder[0], r"\w+")

    return [re.compile(re.sub("[A-Z]+", values_of, name)) for name in names]


def test_every_metric_of_a_row_and_of_a_summary_is_described() -> None:
    row = json.loads((ROOT / "tests/a_row.json").read_text())
    summary = {"steps", "seconds", *speed_summary([row, row])}
    patterns = described_metrics()
    missing = [
        name
        for name in [*row, *summary]
        if not any(pattern.fullmatch(name) for pattern in patterns)
    ]
    assert not missing, "describe them in docs/reference/metrics*.md"


def links(page: Path) -> Iterator[Path]:
    """The files that a page links to, without those on other hosts."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[\w-]*)?\)", text):
        yield (page.parent / target).resolve()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_files(page: Path) -> None:
    missing = [str(target) for target in links(page) if not target.exists()]
    assert not missing


def test_every_page_is_reached_from_the_start() -> None:
    reached = set()
    to_visit = [ROOT / "docs/index.md"]
    while to_visit:
        page = to_visit.pop()
        reached.add(page)
        pages = [target for target in links(page) if target.suffix == ".md" and target.exists()]
        to_visit += [target for target in pages if target not in reached]
    unreached = set((ROOT / "docs").rglob("*.md")) - reached
    assert not unreached


MAX_LINES = 200  # of a page, which answers one question


@pytest.mark.parametrize("page", PAGES[2:], ids=page_id)
def test_pages_are_short(page: Path) -> None:
    n_lines = len(page.read_text().splitlines())
    assert n_lines <= MAX_LINES, f"{page}: {n_lines} lines; split it by its questions"


@pytest.mark.parametrize("page", PAGES[2:], ids=page_id)
def test_pages_begin_with_their_question(page: Path) -> None:
    paragraphs = [text for text in page.read_text().split("\n\n") if not text.startswith("<!--")]
    assert paragraphs[0].startswith("# ")
    says_it_in_its_title = page.parent.name == "how_to" or page == ROOT / "docs/index.md"
    assert says_it_in_its_title or "?" in paragraphs[1]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_modules_in_the_text_exist(page: Path) -> None:
    """Also in fenced blocks and plain text, which `test_paths_in_the_text_exist` leaves out."""
    own_module = r"(?<![\w/.-])((?:one_step_off|agent_loop|benchmarks|tests)/[\w/]+\.py)\b"
    modules = re.findall(own_module, page.read_text())
    missing = [module for module in modules if not (ROOT / module).exists()]
    assert not missing


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


def test_the_architecture_names_files_of_its_packages() -> None:
    page = (ROOT / "docs/concepts/architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", page, re.M)
    assert len(rows) > 12
    missing = []
    for package, text in rows:
        folder = ROOT if package == "agent_loop" else ROOT / "one_step_off"
        for name in re.findall(r"`(\w+\.py)`", text):
            if not list((folder / package).rglob(name)):
                missing.append(f"{package}: {name}")
    assert not missing


def test_the_core_is_read_in_a_day() -> None:
    page = (ROOT / "docs/concepts/the_core_in_a_day.md").read_text()
    files = [ROOT / path for path in re.findall(r"^\| \d+ \| `([\w/]+\.py)` \|", page, re.M)]
    assert 8 <= len(files) <= 12
    assert sum(len(file.read_text().splitlines()) for file in files) <= 6000


def test_the_core_names_what_its_files_define() -> None:
    """Each class and function beside a file in a table of the page is defined in that file."""
    rows = re.findall(
        r"^\|.*`[\w/]+\.py`.*\|$", (ROOT / "docs/concepts/the_core_in_a_day.md").read_text(), re.M
    )
    assert len(rows) > 25
    missing = []
    for row in rows:
        (path,) = re.findall(r"`([\w/]+\.py)`", row)
        text = (ROOT / path).read_text()
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", row):
            definition = rf"^\s*(?:(?:async )?def|class) {name}\b|^{name}\b.* ="
            if not re.search(definition, text, re.M):
                missing.append(f"{name} in {path}")
    assert not missing


def test_the_tables_of_modules_are_current() -> None:
    module = docs_module("make_module_tables")
    generated = module.pages()
    for path, text in generated.items():
        assert path.read_text() == text, "run: python docs/make_module_tables.py"
    everything = "\n".join(generated.values())
    assert "`replica_group.py`" in everything and "`tool_loop.py`" in everything
