"""Models and datasets of the Hugging Face hub: names, and downloads and uploads by huggingface_hub (the extra hub).

Models in object stores are downloaded by the same functions.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable
from functools import partialmethod
from pathlib import Path
from typing import Any

from megatron_llama.config.problems import ConfigError, Problem
from megatron_llama.system.files import mirror, mirrored, read_json, sha256_file
from megatron_llama.system.missing_packages import pip_install
from megatron_llama.system.object_store import RemotePath, is_url, missing_package
from megatron_llama.system.tables import gib

MODEL, DATASET = "model", "dataset"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_NAME = re.compile(r"(?!models/|corpora/|datasets/)[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@\w[\w./-]*)?")
_SMALL = ["*.json", "*.jinja", "*.model", "tokenizer*", "adapter_model*"]
"""Files of a model that a plan, a tokenizer and an adapter need; in its top folder, as is the rest of ``_WHOLE``."""
_WHOLE = [*_SMALL, "model*.safetensors"]
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_failures: dict[str, str] = {}
"""Reasons why names were not downloaded by this process."""


def is_hub_name(name: str) -> bool:
    """Return whether ``name`` could be a hub name, perhaps with a revision: ``org/name@revision``.

    A relative path of two parts could be one too. No hub account is called models, corpora or datasets, which are
    common folder names.
    """
    return bool(_NAME.fullmatch(name)) and ".." not in name and "--" not in name


def resolve_hub_name(name: str, kind: str = MODEL, *, weights: bool = False) -> str:
    """Return the cached folder of a hub name or of a URL in an object store, downloaded first if the cache lacks it.

    Existing paths and other names are returned unchanged, as are names that cannot be downloaded: the check of paths
    then rejects a missing one with ``download_hint``.

    Args:
        weights: Download a model's weights too. ``fetch_weights`` does it later.
    """
    if is_url(name):
        try:
            return str(mirror(RemotePath(name), _WHOLE if weights or kind == DATASET else _SMALL))
        except (OSError, ValueError) as error:
            _failures[name] = _reason(error)
            return name
    if os.path.exists(name) or not is_hub_name(name):
        return name
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        repository, options = _request(name, kind, _WHOLE if weights else _SMALL)
        try:
            return snapshot_download(repository, local_files_only=True, **options)
        except LocalEntryNotFoundError:
            return _download(name, repository, options)
    except Exception as error:  # of huggingface_hub, its HTTP library, the disk
        _failures[name] = _reason(error)
        return name


def fetch_weights(folder: str) -> list[Problem]:
    """Download the weights of a hub model's snapshot ``folder``, if it lacks some; return the problem of a failure.

    The folder may also be the copy of a folder in an object store.
    """
    path, name, remote = Path(folder), hub_name(folder), mirrored(Path(folder))
    try:
        if remote is not None:
            mirror(remote, _WHOLE)
        elif name and not (path / SINGLE).exists() and not _is_complete(path):
            _download(name, *_request(f"{name}@{path.name}", MODEL, _WHOLE))
    except Exception as error:  # of huggingface_hub, its HTTP library, the disk
        rule = f"its weights could not be downloaded: {_reason(error)}"
        instead = "run the same command again" + (f", or {_command(name, MODEL)}" if name else "")
        return [Problem("init_from", remote.url if remote else folder, rule, instead)]
    return []


def _is_complete(snapshot: Path) -> bool:
    """Return whether a snapshot has all files of its index of weights. Raises OSError or ValueError."""
    index = snapshot / INDEX
    return index.exists() and all((snapshot / file).exists() for file in {*read_json(index)["weight_map"].values()})


def _request(name: str, kind: str, files: list[str]) -> tuple[str, dict[str, Any]]:
    """Return repository and options for huggingface_hub: a whole dataset, or a model's ``files``."""
    repository, _, revision = name.partition("@")
    options: dict[str, Any] = {"repo_type": kind, "revision": revision or None, "cache_dir": cache_folder()}
    return repository, options | ({"allow_patterns": files, "ignore_patterns": ["*/*"]} if kind == MODEL else {})


def _download(name: str, repository: str, options: dict[str, Any]) -> str:
    """Download what the cache lacks, and return the folder. Raises OSError."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import tqdm

    if os.path.isdir(first := name.partition("/")[0]):
        raise OSError(f"{first}/ is a folder here")
    if any(os.environ.get(rank) for rank in _RANKS):
        raise OSError("each rank of a launcher would download it")
    if constants.HF_HUB_OFFLINE:
        raise OSError("HF_HUB_OFFLINE is set")
    no_bar = type("NoBar", (tqdm,), {"__init__": partialmethod(tqdm.__init__, disable=True)})
    options = {**options, "endpoint": os.environ.get("HF_ENDPOINT")}
    missing = snapshot_download(repository, dry_run=True, tqdm_class=no_bar, **options)
    folder, size = cache_folder(), sum(file.file_size for file in missing if file.will_download)
    folder.mkdir(parents=True, exist_ok=True)
    if size > (free := shutil.disk_usage(folder).free):
        raise OSError(f"it has {gib(size)}, and {folder} has {gib(free)} free")
    sys.stderr.write(f"downloading {name} to {folder}: {gib(size)}\n")
    snapshot = snapshot_download(repository, **options)
    _check_hashes(Path(snapshot) / file.filename for file in missing if file.will_download)
    return snapshot


def _check_hashes(files: Iterable[Path]) -> None:
    """Compare large files with their sha256, by which the cache names them; huggingface_hub checks only the size.

    Raises:
        OSError: They differ. Such files are deleted.
    """
    for path in files:
        blob = path.resolve()
        if re.fullmatch("[0-9a-f]{64}", blob.name) and sha256_file(blob) != blob.name:
            path.unlink()
            blob.unlink()
            raise OSError(f"{path.name} has another sha256 than the hub's, and was deleted")


def check_upload(name: str) -> None:
    """Check before a long export that ``upload_folder`` has a valid name and a token. Raises ConfigError."""
    try:
        from huggingface_hub import HfApi

        if not is_hub_name(name) or "@" in name:
            raise ValueError("must be a hub name: org/name")
        HfApi(endpoint=os.environ.get("HF_ENDPOINT")).whoami()
    except Exception as error:  # of huggingface_hub, its HTTP library, the disk
        raise ConfigError([_upload_problem(name, error)]) from None


def upload_folder(folder: Path, name: str) -> str:
    """Upload a model's folder as one commit; a new repository is private. Returns the commit's URL.

    Raises:
        ConfigError: The token's account may not write there, or the hub does not answer.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        api.create_repo(name, private=True, exist_ok=True)
        return str(api.upload_folder(repo_id=name, folder_path=folder, commit_message=f"Upload {name}").commit_url)
    except Exception as error:
        raise ConfigError([_upload_problem(name, error)]) from None


def _upload_problem(name: str, error: Exception) -> Problem:
    reason, instead = _reason(error), "write org/name of your account, and set HF_TOKEN to a token that may write"
    instead = "unset HF_HUB_OFFLINE" if "HF_HUB_OFFLINE" in reason else instead
    return Problem("--push-to-hub", name, f"cannot be uploaded: {reason}", instead)


def _reason(error: Exception) -> str:
    """Return why a download failed, in a line."""
    silent = f"no answer from {os.environ.get('HF_ENDPOINT') or 'https://huggingface.co'}"
    text = {
        "GatedRepoError": "its owner grants access: accept the terms on its page, and set HF_TOKEN",
        "RepositoryNotFoundError": "the hub has no such name, or it is private: set HF_TOKEN",
        "LocalTokenNotFoundError": "there is no token",
        "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set",
        "RevisionNotFoundError": "it has no such revision",
        "LocalEntryNotFoundError": silent,
        "DryRunError": silent,
        "ModuleNotFoundError": f"downloads need huggingface_hub: {pip_install(extra='hub')}",
        "TypeError": f"downloads need a newer huggingface_hub: {pip_install(extra='hub')}",  # without dry_run
    }
    causes = [type(error).__name__, type(error.__cause__).__name__]
    reasons = [text[cause] for cause in reversed(causes) if cause in text]
    plain = getattr(error, "strerror", None) or " ".join(str(error).split())[:300]
    return reasons[0] if reasons else plain or causes[0]


def cache_folder() -> Path:
    """Return huggingface_hub's cache folder, from its environment variables."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    home = os.environ.get("HF_HOME") or os.path.join(home, "huggingface")
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(named)))


def download_hint(name: str, kind: str = MODEL) -> str:
    """Return the end of a message with the download command, for a hub name or an incomplete snapshot; else ""."""
    if is_url(name):
        reason, remedy = missing_package(name) or (_failures.get(name, "there is no such object"), "correct the URL")
        return f". The store: {reason}; {remedy}"
    whole = hub_name(name)
    if whole:
        return f", or download the files that the cache lacks: {_command(whole, kind)}"
    if not is_hub_name(name) or os.path.exists(name):
        return ""
    tried = f" (tried: {_failures[name]})" if name in _failures else ""
    hint = f", or download the {kind}, which is not in the Hugging Face cache {cache_folder()}{tried}"
    return f"{hint}: {_command(name, kind)}"


def short_name(folder: str | Path) -> str:
    """Return a folder's name, or the repository's name if the folder is a snapshot of a hub repository."""
    return hub_name(str(folder)).rpartition("/")[2] or os.path.basename(os.path.abspath(folder))


def hub_name(folder: str) -> str:
    """Return the hub name of the repository whose snapshot a folder is; "" for other folders."""
    path = Path(os.path.abspath(folder))
    _, _, name = path.parent.parent.name.partition("s--")
    return name.replace("--", "/") if path.parent.name == "snapshots" else ""


def _command(name: str, kind: str) -> str:
    name, _, revision = name.partition("@")
    kinds = " --repo-type dataset" if kind == DATASET else ""
    return f"hf download {name}" + (f" --revision {revision}" if revision else "") + kinds
