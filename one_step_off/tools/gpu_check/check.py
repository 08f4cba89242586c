"""What a check is, what it gets and how it ends. Nothing heavy is imported here."""

from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
"""What a check measured: name -> number, text, or a list of such. Written as JSON."""


NO_TIME = "no time left"
"""How the reason of a check begins that was skipped because the time of all was spent."""


class Status(Enum):
    """How a check ended."""

    PASS = "PASS"
    FAIL = "FAIL"
    SKIP = "SKIP"


class Skip(Exception):
    """Raised by a check that cannot run here; the message is the reason."""


class CheckFailed(Exception):
    """Raised by a check whose subject does not do what it must; the message names it.

    `figures`: what was measured until then.
    """

    def __init__(self, message: str, figures: Figures | None = None) -> None:
        super().__init__(message)
        self.figures = figures or {}


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: on the command line and in the report.
        title: what it shows, for a reader of the report.
        function: "module:function", imported in the check's own process. It takes a `Context` and
            returns Figures; it may raise Skip or CheckFailed, and any other exception is a failure.
        limit_s: seconds after which it counts as hanging.
        min_gpus: GPUs that it needs on cuda.
        ranks_may_share: one GPU will do where NCCL lets two ranks share it (2.30 and later).
        min_cores: cores that it needs on cpu.
        packages: without which it cannot run.
        cuda_packages: likewise, on cuda alone.
        cuda_only: why it has no CPU form; empty: it has one.
        cpu_title: what it shows on a CPU, where this is less; empty: the same.
        variables: environment variables of its process.
    """

    name: str
    title: str
    function: str
    limit_s: float
    min_gpus: int = 1
    ranks_may_share: bool = False
    min_cores: int = 1
    packages: tuple[str, ...] = ("torch",)
    cuda_packages: tuple[str, ...] = ()
    cuda_only: str = ""
    cpu_title: str = ""
    variables: dict[str, str] = field(default_factory=dict)

    def on(self, device: str) -> "Check":
        """The same check, with the title that is true on this device."""
        if device == "cpu" and self.cpu_title:
            return replace(self, title=self.cpu_title)
        return self


@dataclass(frozen=True)
class Context:
    """What a check gets.

    Attributes:
        device: "cpu" or "cuda".
        gpus: how many GPUs are visible; 0 on cpu.
        folder: of this check alone, for its files.
        shared_folder: of all checks: models that several of them use.
        model: --model, a Hugging Face model directory; "": a random one is built.
        limit_s: seconds that the check has.
    """

    device: str
    gpus: int
    folder: Path
    shared_folder: Path
    model: str
    limit_s: float

    def to_json(self) -> dict[str, Any]:
        """Plain data for the check's process."""
        return {name: _plain(value) for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Context":
        """The inverse of `to_json`."""
        folders = {name: Path(data[name]) for name in ("folder", "shared_folder")}
        return cls(**data | folders)

    @property
    def is_cuda(self) -> bool:
        """Whether the check runs on GPUs."""
        return self.device == "cuda"


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


@dataclass(frozen=True)
class Result:
    """How one check ended.

    Attributes:
        name: of the check.
        status: PASS, FAIL or SKIP.
        seconds: that it took.
        reason: why it failed or was skipped, in one line.
        figures: what it measured.
        log: the last lines of its output, of a check that failed.
    """

    name: str
    status: Status
    seconds: float = 0.0
    reason: str = ""
    figures: Figures = field(default_factory=dict)
    log: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data, for gpu_report.json."""
        return asdict(self) | {"status": self.status.value}
