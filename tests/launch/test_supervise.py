"""Time that the remaining children get after a failure, after Ctrl-C, and after both."""

from __future__ import annotations

import os
import signal

import pytest

from megatron_llama.launch import ssh, start
from megatron_llama.launch import supervise as module
from megatron_llama.launch.supervise import Child, Grace, Signals, supervise

GRACE = Grace(fault=1.0, restart=30.0, interrupt=3.0)


class Fake(Child):
    """A child that ends at a time; ``finishing`` until then."""

    def __init__(self, clock: Clock, end: float, *, status: int = 0, finishing: bool = False) -> None:
        self.clock, self.end, self.status, self.finishing = clock, end, status, finishing
        self.received: list[int] = []

    def poll(self) -> bool:
        ended, self.ended = self.ended, self.clock.now >= self.end
        return self.ended and not ended

    def send(self, number: int) -> None:
        self.received.append(number)

    @property
    def is_finishing(self) -> bool:
        return self.finishing and not self.ended

    @property
    def succeeded(self) -> bool:
        return self.ended and self.status == 0

    @property
    def wants_restart(self) -> bool:
        return self.ended and self.status == 75


class Clock:
    """A clock that advances by each wait."""

    now = 1.0

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module.time, "monotonic", lambda: made.now)
    return made


NEVER = 1000.0


@pytest.mark.parametrize("interrupted", [False, True], ids=["failure", "failure after Ctrl-C"])
def test_a_background_save_is_finished_after_a_failure(clock: Clock, interrupted: bool) -> None:
    children = [Fake(clock, 2.0, status=1), Fake(clock, 50.0, status=1, finishing=True)]
    signals = Signals()
    if interrupted:
        signals._receive(signal.SIGINT, None)
    supervise(children, signals, GRACE, wait=clock.wait)
    assert children[1].ended and clock.now == pytest.approx(50, abs=0.1)


@pytest.mark.parametrize(("status", "seconds"), [(1, 3.0), (130, 3.0), (75, 30.0)])
def test_the_grace_after_ctrl_c_ends(clock: Clock, status: int, seconds: float) -> None:
    """A rank that hangs does not hold the job when another one has ended."""
    children = [Fake(clock, 2.0, status=status), Fake(clock, NEVER)]
    signals = Signals()
    signals._receive(signal.SIGINT, None)
    supervise(children, signals, GRACE, wait=clock.wait)
    assert not children[1].ended and clock.now == pytest.approx(2 + seconds, abs=0.2)


def test_the_first_ctrl_c_has_no_limit_and_the_second_ends_at_once(clock: Clock) -> None:
    """A step and a save may take minutes; a background save does not delay the second Ctrl-C."""
    signals = Signals()
    signals._receive(signal.SIGINT, None)

    def wait(seconds: float) -> None:
        clock.wait(seconds)
        if clock.now > 600 and not signals.ends_at_once:
            signals._receive(signal.SIGINT, None)

    supervise([Fake(clock, NEVER, finishing=True)], signals, GRACE, wait=wait)
    assert 600 < clock.now < 601


@pytest.mark.parametrize("grace", [start.GRACE, ssh.GRACE], ids=["ranks", "hosts"])
@pytest.mark.parametrize("cause", ["failure", "Ctrl-C twice"])
def test_children_that_never_end_have_ten_seconds(clock: Clock, cause: str, grace: Grace) -> None:
    children = [Fake(clock, 5.0 if cause == "failure" else NEVER, status=1), Fake(clock, NEVER)]
    signals = Signals()

    def wait(seconds: float) -> None:
        clock.wait(seconds)
        if cause == "Ctrl-C twice" and clock.now > 5 and not signals.ends_at_once:
            signals._receive(signal.SIGINT, None)

    supervise(children, signals, grace, wait=wait)
    assert 5 < clock.now < 15 and not children[1].ended


def test_a_child_gets_the_signals_that_came_before_it(clock: Clock) -> None:
    first, second = Fake(clock, NEVER), Fake(clock, NEVER)
    with Signals() as signals:
        signals.add(first)
        os.kill(os.getpid(), signal.SIGUSR1)
        signals.add(second)
        os.kill(os.getpid(), signal.SIGTERM)
    assert first.received == second.received == [signal.SIGUSR1, signal.SIGTERM]


def test_signals_are_held_until_the_release() -> None:
    handler = signal.getsignal(signal.SIGUSR1)
    with Signals(hold=True) as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not signals.received
        signals.release()
        assert signals.received == {signal.SIGUSR1}
    with Signals(hold=True):
        pass
    assert signal.getsignal(signal.SIGUSR1) == handler
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
