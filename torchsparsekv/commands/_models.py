"""Models by name or folder, as commands are given them."""
from pathlib import Path


def check_name(name: str) -> None:
    """What can only be a folder has to be there: Hugging Face would say that it is no name of a repository."""
    if not Path(name).expanduser().exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ValueError(f"there is no model at {name}")
