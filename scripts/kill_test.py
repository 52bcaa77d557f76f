"""Kill a run with -9 at random moments, start it again with the same command, and compare it with one that was left
alone.

    python scripts/kill_test.py --kills 20 FOLDER

The losses of all steps and the final weights and optimizer states must be equal to the last bit, and no temporary file
may be left.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_llama.system.files import wait_for_lock  # noqa: E402
from megatron_llama.train.metrics_file import METRICS_FILE, read_metrics  # noqa: E402

# Small and slow enough that most moments are in a step, in a save, or between the two.
OVERRIDES = (
    "model=llama_2m data=mock device=cpu data.seq_length=64 trainer.tp=2 trainer.global_batch_size=4 "
    "checkpoint.every_steps=1 checkpoint.keep=3 logging.tensorboard=false device.peak_tflops=0.1"
).split()


def start(run_dir: Path, steps: int) -> subprocess.Popen[bytes]:
    """Start the run, or start it again; what it prints goes to a file beside the run's folder."""
    command = [sys.executable, "train.py", *OVERRIDES, f"trainer.steps={steps}", f"run.dir={run_dir}"]
    with run_dir.with_name(run_dir.name + ".out").open("ab") as output:
        return subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)


def losses(run_dir: Path) -> list[tuple[int, float]]:
    """(step, loss) of each whole line of metrics.jsonl."""
    path = run_dir / METRICS_FILE
    records = read_metrics(path) if path.exists() else []
    return [(record["step"], record["reduced_train_loss"]) for record in records]


def saving(run_dir: Path) -> bool:
    """Whether a checkpoint is being written at this moment."""
    return any((run_dir / "checkpoints").glob(".step_*"))


def kill_some(run_dir: Path, steps: int, kills: int, seed: int) -> dict[str, int]:
    """Kill the run ``kills`` times; says how often that was during a save, and how often before the first step."""
    chance, counts = random.Random(seed), {"kills": 0, "during a save": 0, "before a step": 0, "starts": 0}
    while counts["kills"] < kills:
        run, before = start(run_dir, steps), len(losses(run_dir))
        counts["starts"] += 1
        # Some moments while it starts up; the others from the first new step on.
        if chance.random() < 0.2:
            time.sleep(chance.uniform(0, 6))
        else:
            while run.poll() is None and losses(run_dir)[before:] == [] and len(losses(run_dir)) >= before:
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 1.5))
            if chance.random() < 0.5:  # half of these in a save
                deadline = time.monotonic() + 5
                while run.poll() is None and not saving(run_dir) and time.monotonic() < deadline:
                    time.sleep(0.001)
        if run.poll() is not None:
            if run.returncode != 0:
                raise SystemExit(f"the run failed by itself with status {run.returncode}; see {run_dir}.out")
            break
        counts["during a save"] += saving(run_dir)
        run.kill()
        run.wait()
        if (run_dir / ".lock").exists():
            with (run_dir / ".lock").open() as lock:
                wait_for_lock(lock)  # the killed run's ranks hold it until they have gone too
        counts["before a step"] += len(losses(run_dir)) <= before
        counts["kills"] += 1
    return counts


def main() -> int:
    """Exit status 0 where nothing differs, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the two runs are written; must not be there yet")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    whole, killed = arguments.folder.resolve() / "whole", arguments.folder.resolve() / "killed"
    begin = time.monotonic()
    if start(whole, arguments.steps).wait() != 0:
        raise SystemExit(f"the run that is left alone failed; see {whole}.out")
    counts = kill_some(killed, arguments.steps, arguments.kills, arguments.seed)
    if start(killed, arguments.steps).wait() != 0:
        raise SystemExit(f"the last start failed; see {killed}.out")
    return compare(whole, killed, counts, time.monotonic() - begin)


def compare(whole: Path, killed: Path, counts: dict[str, int], seconds: float) -> int:
    """Prints what is equal and what is not; the exit status."""
    import torch

    from megatron_llama.checkpoint.folder import find_checkpoint
    from megatron_llama.checkpoint.manifest import read_manifest

    ours, theirs = (read_manifest(find_checkpoint(folder)).stored for folder in (killed, whole))
    differ = [name for name in theirs.tensors if not torch.equal(ours.rows(name), theirs.rows(name))]
    left = [str(path) for path in killed.rglob("*") if path.name.startswith(".") and path.name != ".lock"]
    same_losses = losses(whole) == losses(killed)
    print(", ".join(f"{count} {what}" for what, count in counts.items()), f"in {seconds:.0f} s")
    print(f"losses of {len(losses(whole))} steps: {'equal, all bits' if same_losses else 'DIFFERENT'}")
    found = f"DIFFERENT: {differ}" if differ else "equal, all bits"
    print(f"{len(theirs.tensors)} tensors of the last checkpoint: {found}")
    print(f"temporary files left: {left or 'none'}")
    return 0 if same_losses and not differ and not left else 1


if __name__ == "__main__":
    sys.exit(main())
