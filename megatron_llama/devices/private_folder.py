"""Folders whose files are run as code: only their user and root may own or change them."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

ROOT = 0


def make_private(folder: Path) -> None:
    """Create ``folder`` and its missing parents for this user only. Raises OSError."""
    for missing in reversed([path for path in (folder, *folder.parents) if not os.path.lexists(path)]):
        missing.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(exist_ok=True)  # raises if it is a file


def exposure(folder: Path, *, contents: bool = False) -> tuple[str, str] | None:
    """Return why other users could change the files of ``folder``, and a remedy. None: they cannot, or it is missing.

    The remedy is empty if only another folder helps.

    Checks the folder, all its parents, and the links on the way. A sticky parent such as /tmp is accepted: others
    cannot rename its entries. A folder is accepted if it is writable by a group that has this user's name and no other
    member. Access control lists count as far as the mode of the group shows them.

    Args:
        contents: Check all files in the folder too.
    """
    real, parts, followed = Path("/"), [".", *Path(os.path.abspath(folder)).parts[1:]], 0
    while parts:
        path = Path(os.path.normpath(real / parts.pop(0)))  # of links' targets, a part may be ".."
        try:
            status = os.lstat(path)
        except OSError:  # missing or not accessible: creating it works or fails with a message
            return None
        if not _is_trusted(status.st_uid) and not (parts and _is_unmapped(status.st_uid)):
            return _of_another_user(path, status.st_uid, is_parent=bool(parts))
        if stat.S_ISLNK(status.st_mode):
            if (followed := followed + 1) > 40:
                return f"{path} is a loop of links", ""
            target = Path(os.readlink(path))
            real, parts = Path("/") if target.is_absolute() else real, [*target.parts, *parts]
            continue
        if _others_can_write(status) and not (parts and status.st_mode & stat.S_ISVTX):
            return _writable(path, status, is_parent=bool(parts))
        real = path
    return _exposed_content(real) if contents else None


def _exposed_content(folder: Path) -> tuple[str, str] | None:
    """Return the first file in ``folder`` that another user owns or can change, and a remedy."""
    closed = not folder.stat().st_mode & 0o077
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            try:
                status = os.lstat(path)
            except FileNotFoundError:  # another rank has replaced it
                continue
            if not _is_trusted(status.st_uid):
                return _of_another_user(path, status.st_uid)
            if stat.S_ISLNK(status.st_mode):  # a copy may have links to files of its source
                target = Path(os.path.normpath(path.parent / os.readlink(path)))
                if not all(each.is_relative_to(folder) for each in (target, path.resolve())):
                    return f"{path} is a link to a file outside of the folder", "delete it, or copy with cp -rL"
            elif not closed and _others_can_write(status):
                reason, _ = _writable(path, status)
                return reason, f"delete it, or if you trust its content: chmod 700 {folder}"
    return None


def _of_another_user(path: Path, uid: int, *, is_parent: bool = False) -> tuple[str, str]:
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = f"uid {uid}"
    command = f"chown -R 0 {path}" if os.geteuid() == ROOT else f"use a copy: cp -rL {path} COPY"
    remedy = f"delete it, or if you trust its content: {command}"
    return f"{path} belongs to another user ({name})", "" if is_parent else remedy


def _writable(path: Path, status: os.stat_result, *, is_parent: bool = False) -> tuple[str, str]:
    writers = "all users" if status.st_mode & stat.S_IWOTH else "its group"
    if status.st_uid != os.geteuid():
        remedy = ""
    elif is_parent:
        remedy = f"chmod go-w {path}, or chmod +t {path} if others need to write there"
    else:
        remedy = f"delete it, or if you trust its content: chmod -R go-w {path}"
    return f"{path} is writable by {writers} (mode {stat.S_IMODE(status.st_mode):04o})", remedy


def _is_trusted(uid: int) -> bool:
    return uid in (ROOT, os.geteuid())


def _is_unmapped(uid: int) -> bool:
    """Whether ``uid`` is shown for owners without a number in this container's user namespace, such as root outside."""
    try:
        mapped = Path("/proc/self/uid_map").read_text().split()
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return False
    return uid == overflow and mapped != ["0", "0", "4294967295"]


def _others_can_write(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_own_group(status.st_gid)


def _is_own_group(gid: int) -> bool:
    """Whether the group has the name of this user and no other member, as Debian and Red Hat create them."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and user.pw_gid == gid and set(group.gr_mem) <= {user.pw_name}
