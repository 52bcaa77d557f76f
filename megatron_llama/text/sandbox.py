"""Rendering of untrusted chat templates: jinja2's sandbox in a separate process, with limits on time and memory.

This file is also the program of that process. It reads JSON from stdin, a line per request: first the template, then
variables, messages and the texts to return. It writes a line when it is ready, and a line for each text.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

MOST_SECONDS = 5.0
"""Maximum CPU time of compiling a template or rendering a text; the usual time is below a millisecond."""
MOST_MEMORY = 1 << 30
"""Maximum bytes of address space."""
SMALL, TIMES = 1 << 20, 64
"""A text may have SMALL + TIMES · (characters of the conversation) characters."""
MARKS = ("\ue002", "\ue003")
"""Private-use characters around a generation block."""
MOST_OF_A_DATE = 100
"""Maximum characters of a date format."""


class TemplateFault(Exception):
    """A template does not compile, rejects the messages, or exceeds a limit."""


class Sandbox:
    """A template in a separate process. Each fork that uses it starts another one."""

    def __init__(self, source: str) -> None:
        """Compile a template. Raises TemplateFault, and MachineError if the process does not start."""
        self._source = source
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], Any] = lambda: None
        self._user = 0
        self._ask({"template": source}, self._start(), 1)

    def render(
        self,
        variables: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
        parts: Sequence[tuple[int, bool, bool]],
    ) -> list[str]:
        """Return the text of the first ``count`` messages for each (count, add_generation_prompt, marked) of ``parts``.

        Generation blocks of a marked text are between MARKS.

        Raises TemplateFault, and MachineError if the process does not start.
        """
        process, self._process = self._process, None  # until it has replied: an interrupt may leave half a reply
        if process is None or self._user != os.getpid():  # after a fault, an interrupt or a fork
            process = self._start()
            self._ask({"template": self._source}, process, 1)
        return self._ask({"variables": variables, "messages": messages, "parts": parts}, process, len(parts))

    def _start(self) -> subprocess.Popen[bytes]:
        from megatron_llama.system.errors import MachineError  # the process itself needs jinja2 only

        self._end()
        command, pipe = [sys.executable, "-P", __file__, str(MOST_SECONDS), str(MOST_MEMORY)], subprocess.PIPE
        try:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        except (OSError, TypeError) as error:
            raise MachineError(f"{sys.executable}, which renders chat templates, cannot be started: {error}") from None
        self._user = os.getpid()
        self._end = weakref.finalize(self, _end, process, self._user)
        if _read(process) is None:
            _, errors = process.communicate()
            reason = errors.decode(errors="replace").strip().rpartition("\n")[2]
            raise MachineError(f"the process that renders chat templates ended at its start: {reason}")
        return process

    def _ask(self, request: Mapping[str, Any], process: subprocess.Popen[bytes], count: int) -> list[str]:
        """Return ``count`` replies. The process ends the replies with a fault, if any."""
        assert process.stdin is not None
        with suppress(OSError):  # it has ended, and sends no reply
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        texts: list[str] = []
        while len(texts) < count:
            if (reply := _read(process)) is None:
                status = process.wait()
                if status == -signal.SIGPROF:
                    raise TemplateFault(f"it takes more than {MOST_SECONDS:g} s of CPU time")
                raise TemplateFault(f"it ended the process that renders it, with status {status}")
            if "fault" in reply:
                self._process = process
                raise TemplateFault(reply["fault"])
            texts.append(reply["text"])
        self._process = process
        return texts


def _read(process: subprocess.Popen[bytes]) -> dict[str, str] | None:
    """Return the next reply; None if the process has ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    return json.loads(line) if line.endswith(b"\n") else None


def _end(process: subprocess.Popen[bytes], user: int) -> None:
    """End a process, and close its pipes, which a fork of its user only closes."""
    if os.getpid() == user:
        process.kill()  # forks may hold its stdin open
        process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        with suppress(OSError):
            if pipe is not None:
                pipe.close()


def _environment() -> Any:
    """Return transformers' Jinja environment for chat templates."""
    import jinja2.ext
    import jinja2.sandbox

    class GenerationTag(jinja2.ext.Extension):
        """`{% generation %}`, which marks answers in some templates."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return caller().join(MARKS if self.environment.globals["marks_answers"] else ("", ""))

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["marks_answers"] = False
    return environment


def _texts(template: Any, request: Mapping[str, Any], seconds: float) -> Iterator[str]:
    """Yield the renderings of a request, each within ``seconds``. Raises ValueError if one is too long."""
    messages, now = request["messages"], datetime.now()  # the same date in all texts of a conversation
    variables = {"strftime_now": lambda form: now.strftime(form[:MOST_OF_A_DATE]), **request["variables"]}
    most = SMALL + TIMES * sum(len(message["content"]) for message in messages)
    for count, ask, marked in request["parts"]:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        template.environment.globals["marks_answers"] = marked
        text = template.render(variables, messages=messages[:count], add_generation_prompt=ask)
        if len(text) > most:
            raise ValueError(f"it makes a text of {len(text):,} characters; the limit is {most:,}")
        yield text


def _write(**reply: str) -> None:
    """Write a reply. Raises UnicodeEncodeError for a lone surrogate, which no tokenizer accepts."""
    sys.stdout.buffer.write(json.dumps(reply, ensure_ascii=False).encode() + b"\n")
    sys.stdout.buffer.flush()


def serve(seconds: float, memory: int) -> None:
    """Compile the template in the first line of stdin, and answer the other lines. SIGPROF ends a long rendering."""
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = memory if most == resource.RLIM_INFINITY else min(memory, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    environment, template = _environment(), None
    _write(text="ready")
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            request = json.loads(line)
            if template is None:
                template = environment.from_string(request["template"])
                _write(text="compiled")
            else:
                for text in _texts(template, request, seconds):
                    _write(text=text)
        except MemoryError:
            _write(fault=f"it needs more than {limit >> 20} MiB of memory")
        except (RecursionError, SyntaxError):
            _write(fault="it is nested too deeply")
        except Exception as error:  # a template can cause errors of many kinds
            text = f"{type(error).__name__}: {error}"
            if template is None:  # a syntax error has a line
                text = f"line {error.lineno}: {error}" if hasattr(error, "lineno") else str(error)
            _write(fault=text[:200].encode(errors="replace").decode())


if __name__ == "__main__":
    serve(float(sys.argv[1]), int(sys.argv[2]))
