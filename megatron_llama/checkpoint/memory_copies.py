"""Copies of the newest steps in host memory: a restart loses at most ``checkpoint.memory_every_steps`` steps.

Each rank has two files on its host's RAM disk, which survive the rank and its launcher, and writes them in turn. If the
ranks are on several nodes, the next node keeps the same two files. A file has all weights and states of its rank, with
or without replicas on other ranks: a rank reads only its own file, and another layout cannot use the copies.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_llama import devices
from megatron_llama.checkpoint.folder import delete
from megatron_llama.checkpoint.manifest import Manifest, State, manifest_body, read_manifest, with_checksum
from megatron_llama.checkpoint.rank_files import Chunk, Part, describe_chunks, hash_blocks, part_header, part_key
from megatron_llama.checkpoint.tensor_source import CorruptFile, Rectangles
from megatron_llama.config import ConfigError, Problem
from megatron_llama.config.stored_settings import MEMORY_KEY
from megatron_llama.devices.copy_stream import copy_stream, on_stream
from megatron_llama.devices.private_folder import exposure, make_private
from megatron_llama.parallel.groups import broadcast_from_rank_0, gather_objects, sync_errors
from megatron_llama.system.files import copies_folder, own_folder, path_exists, read_json, write_atomically
from megatron_llama.system.object_store import Location
from megatron_llama.system.signals import run_in_thread
from megatron_llama.system.tables import gib
from megatron_llama.system.ulimits import available_memory

SLOTS = 2
_FILE = re.compile(r"rank_(\d+)\.(\d)\.(json|safetensors)")
_MESSAGE_BYTES = 256 << 20
Sent = list[tuple[dist.Work, torch.Tensor]]
"""Sends in progress, with the memory that they read."""


class UnusableCopy(CorruptFile):
    """A copy is lost, damaged or of another layout, and nothing was loaded from it."""


@dataclass(frozen=True)
class MemoryCopy:
    """A step of which each rank has a copy on some node."""

    step: int
    start: int
    """Number of the run's start that made the copy: a start with other settings may differ at the same step."""

    def __str__(self) -> str:
        return f"the copy of step {self.step} in memory"


@dataclass(frozen=True)
class Register:
    """Content of MEMORY_KEY: the valid copies of a run. A node that was lost may return with others."""

    checkpoints: str
    """The run's checkpoints, to recognize a copy of the run folder: its copies would replace the original's."""
    folder: str = field(default_factory=lambda: secrets.token_hex(8))
    """Folder of the copies on each node."""
    start: int = 0
    """Number of the newest start, whose copies are valid."""
    resumed: MemoryCopy | None = None
    """The copy from which that start has resumed, which is valid too."""

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{16}", self.folder):
            raise ValueError(f"{self.folder!r} is not the name of a folder")

    @classmethod
    def read(cls, checkpoints: Location) -> Register:
        """Read a run's register; return a new one if it is missing or damaged, or if the run folder is a copy."""
        ours = os.path.realpath(checkpoints) if isinstance(checkpoints, Path) else checkpoints.url
        with suppress(OSError, ValueError, TypeError, LookupError):
            values = read_json(checkpoints / MEMORY_KEY)
            resumed = values["resumed"] and MemoryCopy(**values["resumed"])
            if values["checkpoints"] == ours or not path_exists(f"{values['checkpoints']}/{MEMORY_KEY}"):
                return cls(ours, values["folder"], int(values["start"]), resumed)
        return cls(ours)

    def write(self, checkpoints: Location) -> None:
        """Write the register. Raises OSError."""
        write_atomically(checkpoints / MEMORY_KEY, json.dumps(asdict(self)))


class MemoryCopies:
    """This rank's copies, and the copies of ranks of the previous node."""

    def __init__(self, checkpoints: Location, rank: int, device: torch.device, every: int) -> None:
        """Find the copies of earlier starts. A collective. Raises ConfigError if the RAM disk cannot be used."""
        self.every = every
        self._checkpoints, self._rank, self._device = checkpoints, rank, device
        with _synced_errors(every):
            node = _identify_node()
        self._nodes = gather_objects(node)
        self._partners = _partners(self._nodes)
        self._sources = [source for source, partner in enumerate(self._partners) if partner == rank]
        self._group = dist.new_group(backend="gloo") if len(set(self._nodes)) > 1 else None
        self._register = broadcast_from_rank_0(lambda: Register.read(checkpoints))
        self._slots = self._find_copies()
        """Slots of the valid copies on this node, by rank and copy."""
        self._slots_of_ranks = gather_objects(self._slots)
        self._slot = 0
        """Slot of this rank's newest copy."""
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}
        """The mapped files, by rank and slot."""
        self._stream = copy_stream(device, "copies in memory") if devices.of(device).overlaps_copies else None
        self._copied: torch.Event | None = None
        """End of the device's last copy, until later work waits for it."""
        self._exchange: Future[None] | None = None
        """The last copy's work in a thread."""

    def steps(self) -> list[MemoryCopy]:
        """Return the steps of which each rank has a copy, newest first."""
        files, ranks = {file for slots in self._slots_of_ranks for file in slots}, range(len(self._nodes))
        copies = {copy for _, copy in files if all((rank, copy) in files for rank in ranks)}
        return sorted(copies, key=lambda copy: copy.step, reverse=True)

    def load(self, copy: MemoryCopy, tensors: Mapping[str, Rectangles]) -> Manifest:
        """Return this rank's copy of a step, fetched from another node if it is missing or damaged. A collective.

        Raises UnusableCopy on all ranks if a rank has no intact copy, or a copy of other rectangles than ``tensors``.
        """
        key = (self._rank, copy)
        manifest = self._read(self._rank, self._slots[key]) if key in self._slots else None
        for rank, lacks in enumerate(gather_objects(manifest is None)):
            holders = [other for other, slots in enumerate(self._slots_of_ranks) if (rank, copy) in slots]
            holders = [other for other in holders if self._nodes[other] != self._nodes[rank]]
            if lacks and holders and self._rank == holders[0]:
                _wait(self._send(rank, self._slots[rank, copy], rank))
            elif lacks and holders and self._rank == rank:
                make_private(self._folder)
                self._slots[key] = self._receive(holders[0])
                manifest = self._read(rank, self._slots[key])
        missing = [str(rank) for rank, lacks in enumerate(gather_objects(manifest is None)) if lacks]
        if manifest is None or missing:
            raise UnusableCopy(f"rank {', '.join(missing)} has no intact file")
        with sync_errors(UnusableCopy):
            _check_layout(manifest, tensors)
        self._slot = self._slots[key]
        return manifest

    def open(self, tensors: Mapping[str, Rectangles], resumed: MemoryCopy | None) -> str:
        """Reserve memory for copies of ``tensors``; return a line about it for the console. A collective.

        Deletes all copies but the one from which the run has resumed. Raises ConfigError on all ranks if a node has too
        little memory.
        """
        is_first = self._ranks_here[0] == self._rank
        self._register = replace(self._register, start=self._register.start + 1, resumed=resumed)
        with sync_errors(OSError):
            if self._rank == 0:
                self._register.write(self._checkpoints)
        with _synced_errors(self.every):
            make_private(self._folder)
            self._clean(is_first)
            self._lock = own_folder(self._folder, f"{self._register.checkpoints}/{MEMORY_KEY}") if is_first else None
        parts = _in_order(tensors)
        sizes = gather_objects(len(part_header(parts)[0]) + sum(part.nbytes for _, _, part in parts))
        files = {(rank, slot): sizes[rank] for rank in (self._rank, *self._sources) for slot in range(SLOTS)}
        missing = sum(max(0, size - _size(self._file(*key))) for key, size in files.items())
        by_rank = gather_objects((missing, sum(files.values())))
        missing, total = (sum(by_rank[rank][part] for rank in self._ranks_here) for part in range(2))
        with _synced_errors(self.every):
            free = min(shutil.disk_usage(copies_folder().parent).free, *available_memory())
            if is_first and missing > free:
                text = f"{socket.gethostname()} has {gib(free)} free there, and needs {gib(missing)}"
                raise OSError(errno.ENOSPC, text)
        with _synced_errors(self.every):
            for (rank, slot), size in files.items():
                self._reserve(rank, slot, size)
                if rank == self._rank:
                    devices.of(self._device).register_host_memory(self._buffers[rank, slot])
        if resumed is not None and self._group is not None:
            self._restore_second(resumed)
        return f"copies in memory every {self.every} steps: {gib(total)} in {self._folder}"

    def _restore_second(self, copy: MemoryCopy) -> None:
        """Send this rank's copy to the other node if it is missing there: the node may be new. A collective."""
        lacking = [source for source in self._sources if (source, copy) not in self._slots]
        missing = {source for sources in gather_objects(lacking) for source in sources}
        partner = self._partners[self._rank]
        sent = [] if partner is None or self._rank not in missing else self._send(self._rank, self._slot, partner)
        for source in lacking:
            self._receive(source)
        _wait(sent)

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Rectangles], state: State) -> None:
        """Copy the tensors. A thread hashes them and exchanges copies with other nodes. Call ``wait`` before.

        On some devices the copies overlap with the next step: call ``hold_updates`` before it changes the tensors.
        """
        slot = self._slot = 1 - self._slot
        self._file(self._rank, slot, ".json").unlink(missing_ok=True)
        parts, buffer = _in_order(tensors), self._buffers[self._rank, slot]
        header, starts = part_header(parts)
        buffer[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        copies: list[Part] = []
        with on_stream(self._stream):
            for name, offset, part in parts:
                start = starts[part_key(name, offset)]
                copies.append((name, offset, buffer[start : start + part.nbytes].view(part.dtype).view(part.shape)))
                copies[-1][2].copy_(part, non_blocking=True)
        if self._stream is None:
            devices.of(self._device).synchronize()
        else:
            self._copied = self._stream.record_event()

        def finish() -> None:
            if self._stream is not None:
                self._stream.synchronize()
            file = self._file(self._rank, slot).name
            chunks = [
                (name, Chunk(file, starts[part_key(name, offset)], offset, tuple(copy.shape), hash_blocks(copy)))
                for name, offset, copy in copies
            ]
            body = manifest_body(state, {file: buffer.numel()}, describe_chunks(tensors, chunks))
            text = with_checksum({**body, "start": self._register.start})
            self._write(self._rank, slot, text)
            partner = self._partners[self._rank]
            sent = [] if partner is None else self._send(self._rank, slot, partner, text)
            for source in self._sources:
                self._receive(source)
            _wait(sent)

        self._exchange = run_in_thread("memory copy", finish)

    def hold_updates(self) -> None:
        """Let the device begin later work only when it has copied the tensors. The host does not wait."""
        if self._copied is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._copied)
            self._copied = None

    def wait(self) -> None:
        """Wait until the copy in progress is complete. Raises its error."""
        if self._exchange is not None:
            self._exchange.result()

    def delete(self) -> None:
        """Delete all copies of the run, because its newest step is on disk or the copies are invalid. A collective."""
        self.wait()
        gather_objects(None)  # other ranks may still receive
        for (rank, _), buffer in self._buffers.items():
            if rank == self._rank:
                devices.of(self._device).unregister_host_memory(buffer)
        self._buffers.clear()
        _delete(self._register, self._checkpoints)

    @property
    def _folder(self) -> Path:
        return copies_folder() / self._register.folder

    @property
    def _ranks_here(self) -> list[int]:
        """Ranks on this node."""
        return [rank for rank, node in enumerate(self._nodes) if node == self._nodes[self._rank]]

    def _file(self, rank: int, slot: int, suffix: str = ".safetensors") -> Path:
        return self._folder / f"rank_{rank:05d}.{slot}{suffix}"

    def _find_copies(self) -> dict[tuple[int, MemoryCopy], int]:
        """Return the slots of valid copies on this node, by rank and copy. Reports copies of more or fewer ranks."""
        slots, others, size, register = {}, set[int](), len(self._nodes), self._register
        for path in self._folder.glob("rank_*.json"):
            match = _FILE.fullmatch(path.name)
            with suppress(CorruptFile):
                manifest = read_manifest(path.parent, path.name)
                copy = MemoryCopy(manifest.state.step, manifest.start)
                if manifest.state.world_size != size:
                    others.add(manifest.state.world_size)
                elif match and (copy.start == register.start or copy == register.resumed):
                    slots[int(match[1]), copy] = int(match[2])
        if others and self._rank == 0:
            sys.stderr.write(f"checkpoint: the copies in memory are of {max(others)} ranks, not {size}: not used\n")
        return slots

    def _clean(self, is_first: bool) -> None:
        """Make this rank's slots invalid, except the copy from which the run has resumed.

        The first rank of the node deletes the files of ranks that write none there.
        """
        here, resumed = self._ranks_here, self._register.resumed
        for rank, slot in product((self._rank, *self._sources), range(SLOTS)):
            if resumed is None or self._slots.get((rank, resumed)) != slot:
                self._file(rank, slot, ".json").unlink(missing_ok=True)
        ranks = {rank for rank, partner in enumerate(self._partners) if rank in here or partner in here}
        for path in self._folder.iterdir() if is_first else ():
            match = _FILE.fullmatch(path.name)
            if match is None or int(match[1]) not in ranks:
                path.unlink()

    def _reserve(self, rank: int, slot: int, size: int) -> None:
        """Map the file of a slot. Raises OSError if the memory does not suffice: a write would end the process."""
        path = self._file(rank, slot)
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            file.truncate(size)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
        self._buffers[rank, slot] = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)

    def _write(self, rank: int, slot: int, text: str) -> bool:
        """Write the description of a copy, which makes it valid."""
        try:
            write_atomically(self._file(rank, slot, ".json"), text)
        except OSError as error:
            sys.stderr.write(f"checkpoint: a copy in memory is lost: {error.strerror}\n")
            return False
        return True

    def _read(self, rank: int, slot: int) -> Manifest | None:
        """Return the description of a copy; None if copy or description are damaged."""
        try:
            manifest = read_manifest(self._folder, self._file(rank, slot, ".json").name)
            manifest.check_sizes()
            manifest.stored.verify_file(self._file(rank, slot).name)
        except CorruptFile as error:
            sys.stderr.write(f"checkpoint: skipping a damaged copy in memory: {error}\n")
            return None
        return manifest

    def _send(self, rank: int, slot: int, target: int, text: str | None = None) -> Sent:
        """Begin to send a copy with its description, by default from its file; return the operations for ``_wait``."""
        if (rank, slot) not in self._buffers:
            self._reserve(rank, slot, _size(self._file(rank, slot)))
        described = bytearray((text or self._file(rank, slot, ".json").read_text()).encode())
        buffer = self._buffers[rank, slot]
        head = torch.tensor([rank, slot, len(described), buffer.numel()])
        messages = [head, torch.frombuffer(described, dtype=torch.uint8), *buffer.split(_MESSAGE_BYTES)]
        works = [(dist.isend(message, target, group=self._group), message) for message in messages]
        return [(work, message) for work, message in works if work is not None]

    def _receive(self, source: int) -> int:
        """Receive a copy into the file of its slot; return the slot."""
        head = torch.empty(4, dtype=torch.int64)
        dist.recv(head, source, group=self._group)
        rank, slot, length, size = map(int, head.tolist())
        self._file(rank, slot, ".json").unlink(missing_ok=True)
        if (rank, slot) not in self._buffers or self._buffers[rank, slot].numel() != size:
            self._reserve(rank, slot, size)
        text = torch.empty(length, dtype=torch.uint8)
        for message in (text, *self._buffers[rank, slot].split(_MESSAGE_BYTES)):
            dist.recv(message, source, group=self._group)
        if self._write(rank, slot, bytes(text.numpy()).decode()) and self._read(rank, slot) is None:
            self._file(rank, slot, ".json").unlink()
        return slot


def forget_copies(checkpoints: Location) -> None:
    """Delete earlier copies before a start without them, so that no later start loads them. A collective."""
    register = broadcast_from_rank_0(lambda: path_exists(f"{checkpoints}/{MEMORY_KEY}") and Register.read(checkpoints))
    if register:
        _delete(register, checkpoints)


def _delete(register: Register, checkpoints: Location) -> None:
    shutil.rmtree(copies_folder() / register.folder, ignore_errors=True)
    if dist.get_rank() == 0:
        delete(checkpoints / MEMORY_KEY)


def _check_layout(manifest: Manifest, tensors: Mapping[str, Rectangles]) -> None:
    """Raise UnusableCopy unless a copy has the rectangles of ``tensors``."""
    for name, target in tensors.items():
        tensor = manifest.stored.tensors.get(name)
        chunks = [] if tensor is None else [(chunk.offset, chunk.size) for chunk in tensor.chunks]
        if sorted(chunks) != sorted((tuple(offset), tuple(part.shape)) for offset, part in target.parts):
            raise UnusableCopy("its layout differs")


def _in_order(tensors: Mapping[str, Rectangles]) -> list[Part]:
    """Return all rectangles, of larger numbers first: each is then aligned in a file."""
    parts = [(name, offset, part) for name, whole in tensors.items() for offset, part in whole.parts]
    return sorted(parts, key=lambda part: -part[2].dtype.itemsize)


def _partners(nodes: Sequence[str]) -> list[int | None]:
    """Return for each rank the rank on the next node that keeps its copies; None on a single node."""
    ranks = {node: [rank for rank, other in enumerate(nodes) if other == node] for node in nodes}
    following = dict(zip(ranks, [*ranks][1:] + [*ranks][:1], strict=True))
    if len(ranks) == 1:
        return [None] * len(nodes)
    return [
        ranks[following[node]][ranks[node].index(rank) % len(ranks[following[node]])] for rank, node in enumerate(nodes)
    ]


def _identify_node() -> str:
    """Return a text that identifies the RAM disk of this host. Raises OSError if it is missing or not private."""
    status = os.stat(copies_folder().parent)
    make_private(copies_folder())
    if (exposed := exposure(copies_folder())) is not None:
        raise OSError(0, f"{exposed[0]}; {exposed[1]}")
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip() if boot.exists() else socket.gethostname()} {status.st_dev} {status.st_ino}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _wait(works: Sent) -> None:
    for work, _ in works:
        work.wait()


@contextmanager
def _synced_errors(every: int) -> Iterator[None]:
    """Raise OSError of any rank as ConfigError on all ranks."""
    with sync_errors(ConfigError):
        try:
            yield
        except OSError as error:
            disk, larger = copies_folder().parent, "mount -o remount,size=..., docker run --shm-size=... --memory=..."
            instead = f"{f'enlarge {disk} ({larger})' if error.errno == errno.ENOSPC else 'correct that'}, or omit it"
            rule = f"cannot use {disk}: {error.strerror}"
            raise ConfigError([Problem("checkpoint.memory_every_steps", every, rule, instead)]) from error
