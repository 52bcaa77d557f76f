"""Rendering of untrusted chat templates: jinja2's sandbox in a separate process, with limits on time and memory.

This file is also the program of that process. It reads JSON from stdin, a line per request, and writes a line per
reply. The first line has the template; each other line has variables, a list of messages, and the renderings of them.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

MOST_SECONDS = 5.0
"""Maximum CPU time of a request; the usual time is below a millisecond."""
MOST_MEMORY = 1 << 30
"""Maximum bytes of address space."""
SMALL, TIMES = 1 << 20, 64
"""The output may have SMALL + TIMES · (characters of the conversation) characters."""
MOST_OF_A_DATE = 100
"""Maximum characters of a date format."""


class TemplateFault(Exception):
    """A template does not compile, rejects the messages, or exceeds a limit."""


class Sandbox:
    """A template in a separate process, which starts with the first request of each process that uses it."""

    def __init__(self, source: str) -> None:
        """Compile a template. Raises TemplateFault."""
        self._source = source
        self._process: subprocess.Popen[str] | None = None
        self._user = 0
        self._start()

    def render(
        self, variables: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], parts: Iterable[tuple[int, bool]]
    ) -> list[str]:
        """Return the text of the first ``count`` messages for each (count, add_generation_prompt) of ``parts``.

        Raises TemplateFault.
        """
        if self._process is None or self._user != os.getpid():  # after a fault, or a fork
            self._start()
        return list(self._ask({"variables": variables, "messages": messages, "parts": list(parts)})["texts"])

    def _start(self) -> None:
        command = [sys.executable, "-P", __file__, str(MOST_SECONDS), str(MOST_MEMORY)]  # not -m: it needs jinja2 only
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        self._user = os.getpid()
        self._end = weakref.finalize(self, _end, self._process, self._user)
        self._ask({"template": self._source})

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        process, self._process = self._process, None  # until it has replied: an interrupt may leave half a request
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # it has ended
            line = ""
        if not line.endswith("\n"):
            status = process.wait()
            self._end()  # closes the pipes: templates that fail for each conversation must not use up the descriptors
            if status == -signal.SIGPROF:
                raise TemplateFault(f"it takes more than {MOST_SECONDS:g} s of CPU time")
            raise TemplateFault(f"it ended the process that renders it, with status {status}")
        self._process = process
        reply: dict[str, Any] = json.loads(line)
        if "fault" in reply:
            raise TemplateFault(reply["fault"])
        return reply


def _end(process: subprocess.Popen[str], user: int) -> None:
    """End a process, or in a fork of its user close the pipes."""
    assert process.stdin is not None and process.stdout is not None
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # it ended before it read all
            pipe.close()
    if os.getpid() == user:
        process.kill()  # forks may hold its stdin open
        process.wait()


def _environment() -> Any:
    """Return transformers' Jinja environment for chat templates."""
    import jinja2.ext
    import jinja2.sandbox

    class GenerationTag(jinja2.ext.Extension):
        """`{% generation %}`, which marks answers in some templates and is ignored here."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    return environment


def _texts(template: Any, request: Mapping[str, Any]) -> list[str]:
    """Return the renderings of a request. Raises ValueError if one is too long."""
    messages, now = request["messages"], datetime.now()  # the same date in all texts of a conversation
    most = SMALL + TIMES * sum(len(message["content"]) for message in messages)
    texts = [
        template.render(
            {"strftime_now": lambda form: now.strftime(form[:MOST_OF_A_DATE]), **request["variables"]},
            messages=messages[:count],
            add_generation_prompt=ask,
            tools=None,
        )
        for count, ask in request["parts"]
    ]
    if (size := max(map(len, texts), default=0)) > most:
        raise ValueError(f"it makes a text of {size:,} characters; the limit is {most:,}")
    for text in texts:
        text.encode()  # raises UnicodeEncodeError for lone surrogates, which no tokenizer accepts
    return texts


def serve(seconds: float, memory: int) -> None:
    """Compile the template in the first line of stdin, and answer the other lines. SIGPROF ends a long request."""
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    environment, template = _environment(), None
    faults = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            request = json.loads(line)
            if template is None:
                template = environment.from_string(request["template"])
                reply: dict[str, Any] = {}
            else:
                reply = {"texts": _texts(template, request)}
        except MemoryError:
            reply = {"fault": f"it needs more than {memory >> 20} MiB of memory"}
        except (RecursionError, SyntaxError):
            reply = {"fault": "it is nested too deeply"}
        except Exception as error:
            if not isinstance(error, faults) and "jinja2" not in type(error).__module__:
                raise  # a fault of this program: the process ends with a status
            reply = {"fault": (str(error) if template is None else f"{type(error).__name__}: {error}")[:200]}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve(float(sys.argv[1]), int(sys.argv[2]))
