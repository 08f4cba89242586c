"""The configs that come with the package: `config=NAME` finds them from any folder."""

from pathlib import Path

CONFIG_FOLDER = Path(__file__).parents[1] / "shipped_configs"


def shipped_names() -> list[str]:
    """The names of the configs that come with the package, sorted."""
    return sorted(path.stem for path in CONFIG_FOLDER.glob("*.yaml"))


def find_config_file(config: str) -> str:
    """The file that `config` means: that file, or the package's config of that name.

    A file in the working directory comes first. A name that is neither is returned as it is.
    """
    shipped = CONFIG_FOLDER / f"{config}.yaml"
    if Path(config).exists() or config not in shipped_names():
        return config
    return str(shipped)
