"""Names of the Hugging Face hub, such as meta-llama/Llama-2-7b-hf, in place of folders: looked up in the local cache.

The one place that knows the cache's layout (huggingface_hub's: models--org--name/snapshots/COMMIT, and refs/main with
the newest commit). Nothing is ever downloaded here: a start on a thousand ranks is no moment to fetch 140 GB, and nodes
often have no way out. Where something is missing, the message has the command that fetches it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

MODEL, DATASET = "model", "dataset"
_NAME = re.compile(r"(?!models/|datasets/)[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(name: str) -> bool:
    """Whether it could be a name of the hub; a relative path of two parts could be, too. Nobody there is called models
    or datasets, as folders often are."""
    return bool(_NAME.fullmatch(name)) and ".." not in name and "--" not in name


def local_folder(name: str, kind: str = MODEL) -> str:
    """The folder that a name means: itself where it is a path that exists or no name of the hub, else what the cache
    holds. A name that is neither comes back as it is, for the check of the path to refuse with ``or_fetch_it``."""
    if os.path.exists(name) or not is_hub_name(name):
        return name
    repository = cache_folder() / f"{kind}s--{name.replace('/', '--')}"
    try:
        commit = (repository / "refs" / "main").read_text(encoding="ascii").strip()
        commits = [commit]
    except (OSError, UnicodeDecodeError):
        commits = [path.name for path in repository.glob("snapshots/*")]  # fetched by a commit's number alone
    found = [repository / "snapshots" / commit for commit in commits]
    return str(found[0]) if len(found) == 1 and found[0].is_dir() else name


def cache_folder() -> Path:
    """Where huggingface_hub keeps what it downloads, by the variables that it reads."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    home = os.environ.get("HF_HOME") or os.path.join(home, "huggingface")
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(named)))


def or_fetch_it(name: str, kind: str = MODEL) -> str:
    """The end of a message on a path that is not there, where it could be a name of the hub's, or on a snapshot of the
    cache that lacks files; else nothing."""
    whole = _repository(name)
    if whole:
        return f", or fetch the files that the cache lacks: {_command(whole, kind)}"
    if not is_hub_name(name) or os.path.exists(name):
        return ""
    return f", or fetch the {kind}, which is not in the Hugging Face cache {cache_folder()}: {_command(name, kind)}"


def short_name(folder: str) -> str:
    """What to call a folder: its own name, or that of the hub's repository whose snapshot it is."""
    return _repository(folder).rpartition("/")[2] or os.path.basename(os.path.abspath(folder))


def _repository(folder: str) -> str:
    """The hub's name of the repository whose snapshot a folder is; nothing for other folders."""
    path = Path(os.path.abspath(folder))
    _, _, name = path.parent.parent.name.partition("s--")
    return name.replace("--", "/") if path.parent.name == "snapshots" else ""


def _command(name: str, kind: str) -> str:
    return f"hf download {name}" + (" --repo-type dataset" if kind == DATASET else "")
