"""checkpoint.memory_every_steps: copies in host memory, on one node and on several."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from megatron_llama.checkpoint import memory_copies
from megatron_llama.checkpoint.checkpointer import Checkpointer
from megatron_llama.checkpoint.tensor_source import CorruptFile
from megatron_llama.devices.cpu.device import Cpu
from megatron_llama.system import files
from tests.checkpoint.runner import Run, assert_same, flip, losses, run, run_job, with_each_step
from tests.messages import raises_with_message
from tests.processes import rank
from tests.ranks import RankFailed

Nodes = Callable[[int], list[Path]]
EVERY = "checkpoint.memory_every_steps=2"
FAILS_AT = 5
LAYOUTS: dict[str, tuple[int, int, list[str]]] = {
    "1 node": (2, 2, ["trainer.tp=2"]),
    "2 nodes, zero": (2, 1, ["trainer.zero=3"]),
    "2 nodes, replicas": (4, 2, ["trainer.zero=0", "trainer.micro_batch_size=2", "optim.state_bits=8"]),
    "2 nodes, pp": (2, 1, ["trainer.pp=2", "trainer.dp=1"]),
}
"""Ranks, ranks per node, settings."""


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """Give the ranks RAM disks of their nodes; returns the function that gets the ranks per node."""

    def divide(per_node: int) -> list[Path]:
        folders = [tmp_path / f"node{number}" for number in range(2)]
        for folder in folders:
            folder.mkdir(exist_ok=True)
        for module in (memory_copies, files):
            monkeypatch.setattr(
                module, "copies_folder", lambda: folders[int(os.environ.get("RANK", 0)) // per_node] / "x"
            )
        return folders

    return divide


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Return the function that gives the run of a layout without copies and faults."""

    @cache
    def of_layout(layout: str) -> Run:
        world, _, settings = LAYOUTS[layout]
        return run(world, tmp_path_factory.mktemp("whole"), *settings, until=6)

    return of_layout


def fail(checkpointer: Checkpointer) -> None:
    """Raise on all ranks after step FAILS_AT, when the copies are complete."""
    after_step = checkpointer.after_step

    def failing(step: int, *arguments: object) -> bool:
        stop = after_step(step, *arguments)  # type: ignore[arg-type]
        if step == FAILS_AT:
            assert checkpointer.memory is not None
            checkpointer.memory.wait()
            dist.barrier()
            raise RuntimeError("the ranks fail")
        return stop

    checkpointer.after_step = failing  # type: ignore[assignment,method-assign]


def interrupt(world: int, folder: Path, *settings: str) -> None:
    """Run until all ranks fail."""
    with raises_with_message(RankFailed, "the ranks fail"):
        run(world, folder, *settings, until=6, tamper=fail)


def copies(folder: Path, rank: int, step: int, ending: str = ".safetensors") -> Path:
    """Return the file of a rank's copy on a node."""
    (description,) = (
        path for path in folder.glob(f"*/*/rank_{rank:05d}.*.json") if f'"step": {step},' in path.read_text()
    )
    return description.with_suffix(ending)


DAMAGES: dict[str, tuple[str, Callable[[list[Path]], object], int, str]] = {
    "none": ("1 node", lambda nodes: None, 4, "resuming from the copy of step 4 in memory checkpoint: copies"),
    "flipped": ("1 node", lambda nodes: flip(copies(nodes[0], 1, 4)), 2, "wrong hash of"),
    "truncated": ("1 node", lambda nodes: os.truncate(copies(nodes[0], 0, 4), 99), 2, "has 99 of"),
    "a description flipped": ("1 node", lambda nodes: flip(copies(nodes[0], 1, 4, ".json")), 2, "the copy of step 2"),
    "all lost": ("1 node", lambda nodes: shutil.rmtree(nodes[0] / next(nodes[0].iterdir()).name), 0, ""),
    "a node lost": ("2 nodes, zero", lambda nodes: clear(nodes[1]), 4, "the copy of step 4"),
    "the first node lost": ("2 nodes, replicas", lambda nodes: clear(nodes[0]), 4, "the copy of step 4"),
    "a node lost, pp": ("2 nodes, pp", lambda nodes: clear(nodes[1]), 4, "the copy of step 4"),
    "flipped, other node": ("2 nodes, zero", lambda nodes: flip(copies(nodes[1], 1, 4)), 4, "wrong hash of"),
    "an older partner": (
        "2 nodes, zero",
        lambda nodes: (copies(nodes[0], 1, 4, ".json").unlink(), clear(nodes[1])),
        2,
        "the copy of step 2",
    ),
    "both nodes": (
        "2 nodes, zero",
        lambda nodes: [flip(copies(node, 0, step)) for node in nodes for step in (2, 4)],
        0,
        "rank 0 has no intact file",
    ),
}
"""Layout, damage, step from which the run resumes, message."""


def clear(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


FAST = ("flipped", "the first node lost", "an older partner")


@pytest.mark.parametrize(
    "name", [each if each in FAST else pytest.param(each, marks=pytest.mark.slow) for each in DAMAGES]
)
def test_the_newest_intact_copy_is_used(
    name: str, nodes: Nodes, uninterrupted: Callable[[str], Run], tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    layout, damage, step, message = DAMAGES[name]
    world, per_node, settings = LAYOUTS[layout]
    folders = nodes(per_node)
    interrupt(world, tmp_path / "run", *settings, EVERY)
    damage(folders)
    resumed = run(world, tmp_path / "run", *settings, EVERY, until=6)
    assert resumed.started_at == step and message in " ".join(capfd.readouterr().err.split())
    whole = uninterrupted(layout)
    assert resumed.losses == {number: loss for number, loss in whole.losses.items() if number > step}
    assert resumed.random == whole.random
    assert_same(resumed.tensors, whole.tensors)
    assert not [*tmp_path.glob("node*/*/*")]  # the end of the run frees the memory


@pytest.mark.slow
def test_nodes_are_lost_one_after_the_other(nodes: Nodes, tmp_path: Path) -> None:
    folders = nodes(1)
    for folder in (folders[1], folders[0]):  # the start in between makes no copy
        interrupt(2, tmp_path / "run", EVERY)
        clear(folder)
    assert run(2, tmp_path / "run", EVERY, until=4).started_at == 4


@pytest.mark.slow
def test_a_node_that_returns_has_copies_of_another_start(nodes: Nodes, tmp_path: Path) -> None:
    folders = nodes(1)

    places = (*folders, tmp_path / "run")

    def copy_to(target: str, source: str = "", chosen: Sequence[Path] = places) -> None:
        for name in (each.name for each in chosen):
            shutil.rmtree(tmp_path / target / name, ignore_errors=True)
            shutil.copytree(tmp_path / source / name, tmp_path / target / name)

    interrupt(2, tmp_path / "run", EVERY)
    copy_to("first")
    for folder in folders:
        flip(copies(folder, 1, 4))
    other = [EVERY, "optim.lr=0.001", "checkpoint.allow=[optim]"]
    interrupt(2, tmp_path / "run", *other)  # from step 2
    copy_to("second")
    expected = run(2, tmp_path / "run", *other, until=6)
    copy_to("", "second")
    copy_to("", "first", folders[1:])
    resumed = run(2, tmp_path / "run", *other, until=6)
    assert resumed.started_at == expected.started_at == 4 and resumed.losses == expected.losses


@pytest.mark.parametrize(
    ("world", "settings", "message"),
    [
        (4, ["trainer.pp=2", "trainer.dp=2"], "skipping the copy of step 4 in memory: its layout differs"),
        pytest.param(2, ["trainer.tp=2"], "the copies in memory are of 4 ranks, not 2", marks=pytest.mark.slow),
    ],
    ids=["layout", "ranks"],
)
def test_another_layout_resumes_from_the_disk(
    world: int, settings: list[str], message: str, nodes: Nodes, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    nodes(4)
    saves = (EVERY, "checkpoint.every_steps=3", "checkpoint.asynchronous=false")
    with raises_with_message(RankFailed, "the ranks fail"):
        run(4, tmp_path / "run", "trainer.tp=2", "trainer.dp=2", *saves, until=6, tamper=fail)
    assert run(world, tmp_path / "run", *settings, *saves, until=3).started_at == 3
    assert " ".join(capfd.readouterr().err.split()).count(message) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("resume", "step"), [("never", 0), ("PATH", 1)])
def test_a_run_that_begins_elsewhere_forgets_its_copies(resume: str, step: int, nodes: Nodes, tmp_path: Path) -> None:
    nodes(2)
    settings = ["trainer.tp=2", EVERY, "checkpoint.every_steps=1"]
    path = f"checkpoint.resume={resume.replace('PATH', str(tmp_path / 'run' / 'checkpoints' / 'step_00000001'))}"
    interrupt(2, tmp_path / "run", *settings)
    assert run(2, tmp_path / "run", *settings, path, until=step).started_at == step


@pytest.mark.slow
def test_a_start_without_copies_deletes_earlier_ones(nodes: Nodes, tmp_path: Path) -> None:
    nodes(2)
    interrupt(2, tmp_path / "run", "trainer.tp=2", EVERY)
    assert run(2, tmp_path / "run", "trainer.tp=2", until=1).started_at == 0
    assert not [*tmp_path.glob("node*/*/*")]
    assert run(2, tmp_path / "run", "trainer.tp=2", EVERY).started_at == 1


def test_a_copied_run_folder_has_no_copies_but_a_moved_one_has(nodes: Nodes, tmp_path: Path) -> None:
    nodes(2)
    interrupt(2, tmp_path / "run", "trainer.tp=2", EVERY)
    shutil.copytree(tmp_path / "run", tmp_path / "copied")
    assert run(2, tmp_path / "copied", "trainer.tp=2", EVERY, until=2).started_at == 0
    assert not files.remove_orphans()
    shutil.move(tmp_path / "run", tmp_path / "moved")
    assert run(2, tmp_path / "moved", "trainer.tp=2", EVERY, tamper=check_unregistered).started_at == 4
    interrupt(2, tmp_path / "moved", "trainer.tp=2", EVERY)
    shutil.rmtree(tmp_path / "moved")
    assert files.remove_orphans() > 1 << 20 and not [*tmp_path.glob("node*/*/*")]


def check_unregistered(checkpointer: Checkpointer) -> None:
    """Check that ``delete`` unregisters all registered memory: CUDA would keep it, and the next start would fail."""
    registered, memory = set[int](), checkpointer.memory
    assert memory is not None
    memory_deleted = memory.delete
    Cpu.register_host_memory = lambda _, buffer: registered.add(buffer.data_ptr())  # type: ignore[method-assign]
    Cpu.unregister_host_memory = lambda _, buffer: registered.remove(buffer.data_ptr())  # type: ignore[method-assign]

    def delete() -> None:
        assert len(registered) == memory_copies.SLOTS
        memory_deleted()
        assert not registered

    memory.delete = delete  # type: ignore[method-assign]


def test_a_killed_rank_loses_no_step_of_a_copy(tmp_path: Path) -> None:
    folder, settings = tmp_path / "run", ["trainer.tp=2", "trainer.steps=6"]

    def killed(step: int, run_dir: Path) -> None:
        if step == 6 and rank() == 1 and not (run_dir / "killed").exists():
            (run_dir / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    output = run_job(folder, *settings, EVERY, "trainer.max_restarts=1", work=with_each_step(killed))
    assert re.search(r"resuming from the copy of step [24] in memory", output), output
    run_job(tmp_path / "whole", *settings)
    assert losses(folder) == losses(tmp_path / "whole")


def test_a_copy_that_fails_while_it_is_loaded_is_not_trained_on(nodes: Nodes, tmp_path: Path) -> None:
    nodes(2)
    interrupt(2, tmp_path / "run", "trainer.tp=2", EVERY)
    fails = Mock(side_effect=CorruptFile("not finite"))
    with raises_with_message(RankFailed, "all checkpoints are damaged: not finite; not finite"):
        run(2, tmp_path / "run", "trainer.tp=2", EVERY, until=6, tamper=lambda each: setattr(each, "_fill", fails))


@pytest.mark.parametrize(
    ("name", "fault", "message"),
    [
        (
            "available_memory",
            Mock(return_value=[1 << 20]),
            "1 MiB free there, and needs .*MiB instead enlarge .*, or omit it",
        ),
        ("make_private", Mock(side_effect=OSError(30, "Read-only")), ": Read-only instead correct that, or omit it"),
    ],
)
def test_unusable_memory_is_refused(
    name: str, fault: Mock, message: str, nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes(2)
    monkeypatch.setattr(memory_copies, name, fault)
    with raises_with_message(RankFailed, f"memory_every_steps = 2 rule cannot use .*{message}"):
        run(2, tmp_path / "run", "trainer.tp=2", EVERY, until=1)
