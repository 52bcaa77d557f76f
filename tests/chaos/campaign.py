"""Deals out faults to runs, and judges what became of each: nothing lost, no hang, the right status, no leftovers."""

from __future__ import annotations

import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megatron_llama.system.files import DRAFT
from tests.chaos.attempts import STEPS, Attempt, Life
from tests.chaos.faults import DAMAGED_FILES, FAULTS, HANG_SECONDS, MAKE_HANG, NEED_INTERPOSER, Fault, damage_file
from tests.chaos.interposer import Interposer
from tests.checkpoint.runner import final_tensors, leftovers
from tests.data.files import write_indexed

LIMIT_SECONDS = 300.0
"""Time limit of an attempt without a fault, long enough for a busy machine."""
GONE_SECONDS = 20.0
"""Time limit for the other processes to end after the launcher."""
DAMAGE = "damage"
KINDS_OF_FAULT = (*FAULTS, DAMAGE)


class Broken(Exception):
    """A check failed."""


@dataclass
class Undisturbed:
    """Results of a run without faults."""

    losses: list[tuple[int, float]]
    tensors: dict[str, torch.Tensor]


class Campaign:
    """Faults to runs in several layouts, below one folder."""

    def __init__(
        self, folder: Path, layouts: Sequence[str], kinds: Sequence[str], seed: int, interposer: Interposer | None
    ) -> None:
        self.folder, self.layouts, self.seed, self.interposer = folder, layouts, seed, interposer
        self.kinds = [kind for kind in kinds if interposer is not None or kind not in NEED_INTERPOSER]
        self.outcomes: dict[str, Counter[str]] = {kind: Counter() for kind in self.kinds}
        """Exit statuses and verdicts, by kind of fault."""
        self.failures: list[str] = []
        self.longest = 0.0
        self.lives: dict[str, Life] = {}
        self._count = 0
        (folder / "data").mkdir()
        lengths = [length for length in range(20, 60) for _ in range(4)]
        documents = [np.random.default_rng(length).integers(0, 64, length).tolist() for length in lengths]
        self.dataset = Path(write_indexed(folder / "data/tokens", documents))
        self.undisturbed = {layout: self._leave_alone(layout) for layout in layouts}

    def run(self, faults: int) -> Iterator[str]:
        """Inject ``faults`` faults; yield a line about each."""
        number = 0
        while number < faults:
            # Each fault has a separate seed, so that it can be repeated alone.
            chance = random.Random(f"{self.seed}/{self._count}")
            self._count += 1
            kind, layout = self.kinds[number % len(self.kinds)], chance.choice(list(self.layouts))
            try:
                reported = self._damage(layout, chance) if kind == DAMAGE else self._harm(kind, layout, chance)
            except Broken as broken:
                self.outcomes[kind]["BROKEN"] += 1
                self.failures.append(f"seed {self.seed}/{self._count - 1}, {kind}, {layout}: {broken}")
                reported = f"BROKEN: {broken}"
            if reported:
                number += 1
                yield f"{number}/{faults} {kind}, {layout}: {reported}"
        for layout in list(self.lives):
            try:
                self._finish(self.lives.pop(layout))
            except Broken as broken:
                self.failures.append(f"the end of {layout}: {broken}")

    def _leave_alone(self, layout: str) -> Undisturbed:
        life = Life(self.folder / f"{layout}_undisturbed", layout, self.dataset)
        with self._attempt(life) as attempt:
            if not attempt.wait(LIMIT_SECONDS) or attempt.status != 0:
                raise Broken(f"the undisturbed run ended with {attempt.status}:\n{attempt.output}")
        return Undisturbed(life.losses(), final_tensors(life.folder))

    def _life(self, layout: str) -> Life:
        if layout not in self.lives:
            self.lives[layout] = Life(self.folder / f"{layout}_{self._count:04d}", layout, self.dataset)
        return self.lives[layout]

    def _harm(self, kind: str, layout: str, chance: random.Random) -> str | None:
        """One attempt with one fault, and whether all was as it must be; None where the run ended before the fault."""
        life = self._life(layout)
        hang = [f"trainer.hang_timeout_seconds={HANG_SECONDS}"] if kind in MAKE_HANG else []
        resumable = life.resumable_steps()
        with self._attempt(life, *hang) as attempt:
            fault = FAULTS[kind](attempt, chance, self.interposer)
            begin = time.monotonic()
            if fault is not None:
                life.faults.append(fault.description)
            if not attempt.wait(LIMIT_SECONDS if fault is None else fault.seconds + LIMIT_SECONDS / 5):
                raise Broken(f"no end within {time.monotonic() - begin:.0f} s of {fault and fault.description}")
            self.longest = max(self.longest, time.monotonic() - begin)
            if fault is not None and self.interposer is not None:
                self.interposer.heal()
            self._judge(life, attempt, fault, resumable)
            if attempt.status == 0:
                self._finished(self.lives.pop(layout), disk_failed=kind == "disk")
        if fault is None:
            return None
        self.outcomes[kind][f"status {attempt.status}"] += 1
        return f"{fault.description}: status {attempt.status}, {time.monotonic() - begin:.1f} s"

    def _judge(self, life: Life, attempt: Attempt, fault: Fault | None, resumable: range) -> None:
        """Raises Broken for what an attempt did wrong."""
        fault = fault or Fault("no fault", frozenset({0}))
        description = fault.description
        if attempt.status not in fault.statuses:
            raise Broken(f"{description}: status {attempt.status}, not one of {sorted(fault.statuses)}")
        if not attempt.gone(GONE_SECONDS):
            raise Broken(f"{description}: processes {attempt.processes()} still run")
        output = attempt.output
        if (count := output.count("Traceback (most recent call last)")) > fault.tracebacks:
            raise Broken(f"{description}: {count} tracebacks, where {fault.tracebacks} are allowed")
        if attempt.status == 1 and (missing := [w for w in fault.messages if w not in output]):
            raise Broken(f"{description}: it failed without the messages {missing}")
        wrong = [pair for pair in life.losses() if pair not in self.undisturbed[life.layout].losses]
        if wrong:
            raise Broken(f"{description}: (step, loss) {wrong[0]} is not the undisturbed run's")
        first = re.search(rf"^step (\d+)/{STEPS}", output, re.MULTILINE)
        if first and int(first[1]) - 1 not in resumable:
            raise Broken(f"{description}: resumed at step {first[1]}, and step {resumable[0]} was saved")
        last = life.losses()[-1][0] if life.losses() else 0
        if attempt.status == 75 and fault.saved and life.newest_checkpoint() != last:
            raise Broken(f"{description}: status 75, but of {last} steps {life.newest_checkpoint()} are saved")

    def _finish(self, life: Life) -> None:
        """Lets a run come to its end, and judges it."""
        resumable = life.resumable_steps()
        with self._attempt(life) as attempt:
            if not attempt.wait(LIMIT_SECONDS):
                raise Broken("no end of the last attempt")
            self._judge(life, attempt, None, resumable)
            self._finished(life)

    def _finished(self, life: Life, disk_failed: bool = False) -> None:
        """Raise Broken unless a finished run is bit-identical to the undisturbed one; then delete it.

        ``disk_failed``: a failed disk keeps drafts until the next start.
        """
        undisturbed = self.undisturbed[life.layout]
        if life.losses() != undisturbed.losses:
            raise Broken("the losses of the finished run are not the undisturbed one's")
        ours = final_tensors(life.folder)
        differ = [n for n, tensor in undisturbed.tensors.items() if n not in ours or not torch.equal(ours[n], tensor)]
        if differ or ours.keys() != undisturbed.tensors.keys():
            raise Broken(f"tensors of the finished run differ: {differ[:3]}")
        if left := [name for name in leftovers(life.folder) if not (disk_failed and name.endswith(DRAFT))]:
            raise Broken(f"left behind: {left}")
        shutil.rmtree(life.folder)
        life.output.unlink()

    def _damage(self, layout: str, chance: random.Random) -> str:
        """Damages a file of a run that has ended, and starts that again for a few steps more."""
        kind = chance.choice(list(DAMAGED_FILES))
        place = self.folder / f"{layout}_{self._count:04d}"
        shutil.copytree(self.folder / f"{layout}_undisturbed", place / "run")
        shutil.copytree(self.dataset.parent, place / "data")
        for path in (place / "run/checkpoints").glob(f"step_{STEPS:08d}"):
            shutil.rmtree(path)  # so that it has steps to train
        path = chance.choice(sorted(place.glob(DAMAGED_FILES[kind])))
        description = f"{kind}, {damage_file(path, chance)}"
        life = Life(place / "run", layout, place / "data" / self.dataset.name)
        with self._attempt(life) as attempt:
            if not attempt.wait(LIMIT_SECONDS):
                raise Broken(f"{description}: no end")
            if attempt.status not in (0, 2) or "Traceback" in attempt.output:
                raise Broken(f"{description}: status {attempt.status}, or a traceback")
            reported = attempt.status == 2 or "damaged" in attempt.output
            trained = attempt.status == 0 and self._same_end(life)
            if attempt.status == 0 and not trained and not reported and kind != ".bin":
                raise Broken(f"{description}: losses changed silently")
        shutil.rmtree(place)
        outcome = f"status {attempt.status}, {'reported' if reported else 'unharmed' if trained else 'UNDETECTED'}"
        self.outcomes[DAMAGE][outcome] += 1
        return f"{description}: {outcome}"

    def _same_end(self, life: Life) -> bool:
        """Whether the last checkpoint is the undisturbed run's."""
        ours, theirs = final_tensors(life.folder), self.undisturbed[life.layout].tensors
        return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)

    @contextmanager
    def _attempt(self, life: Life, *settings: str) -> Iterator[Attempt]:
        """Start a run, and end it. If it is Broken, retain its folder with its faults; the next run uses a new one."""
        attempt = life.start(*settings)
        try:
            yield attempt
        except Broken:
            life.folder.with_name(life.folder.name + ".faults").write_text("\n".join(life.faults) + "\n")
            self.lives.pop(life.layout, None)
            raise
        finally:
            attempt.kill()
            if self.interposer is not None:
                self.interposer.heal()
