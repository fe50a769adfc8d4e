"""The models of the command line, by name or folder."""
from pathlib import Path


def check_name(name: str) -> None:
    """Refuse a missing folder. Hugging Face would report it as an invalid repository name."""
    if not Path(name).expanduser().exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ValueError(f"there is no model at {name}")
