"""Jinja sandbox for untrusted templates: jinja2's sandbox with limits on time and size.

Each value is measured when it is created, and no operation may create a value that is much larger than its inputs. The
work between two measurements is bounded, so a clock that is read at measurements, loop iterations and calls limits the
time.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import GeneratorType
from typing import Any

from jinja2 import TemplateError, TemplateRuntimeError, nodes
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MOST_SOURCE = 1 << 18
"""Maximum characters of a template; the longest published ones have 20,000."""
MOST_SECONDS = 5.0
"""Maximum CPU time of a rendering; the usual time is below a millisecond."""
MOST_UNCLOCKED = 50
"""Measurements between two reads of the clock, which are slow in comparison."""
SMALL, TIMES = 1 << 20, 64
"""A value, and the whole output, may have SMALL + TIMES · (characters of the conversation) characters."""
LARGEST_NUMBER = 10_000
"""Largest numeric argument, such as a width, an indentation or a number of repetitions."""
MOST_BITS = 256
"""Maximum bits of an integer."""
_WIDE = re.compile(r"\*|\d{4}")
_GROWS = ("replace", "join", "indent", "expandtabs", "wordwrap", "xmlattr", "tojson", "batch", "slice")
"""Filters and methods whose output size is a product of the sizes of value and argument."""
_REMOVED = ("lipsum", "urlize", "striptags", "sum")
_NOT_CALLED = ("encode", "translate", "maketrans")
"""Slow or unbounded functions that no chat template uses."""
_COUNTED, _JOINED, _MEASURED = "_counted", "_joined", "_measured"


class TooMuch(TemplateRuntimeError):
    """A template exceeded a limit."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with limits; ``start`` begins a rendering."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(
        self, filters: Mapping[str, Callable[..., Any]], functions: Mapping[str, Callable[..., Any]], **options: Any
    ) -> None:
        """Add ``filters`` and ``functions`` to jinja2's."""
        # Not optimized: else constant expressions are evaluated, without limits, at compilation.
        super().__init__(optimized=False, finalize=self._put_out, **options)
        for name in _REMOVED:
            self.globals.pop(name, None)
        self.globals.update(functions)
        available: dict[str, Any] = {**self.filters, **filters}
        self.filters: dict[str, Any] = {
            name: self._guarded(name, function) for name, function in available.items() if name not in _REMOVED
        }
        self.tests = {name: self._guarded(name, function) for name, function in self.tests.items()}
        self.filters |= {_COUNTED: self._counted, _JOINED: self._joined, _MEASURED: self.measured}
        self._source_size = 0
        self.start(0)

    def start(self, characters: int) -> None:
        """Begin a rendering; ``characters``: size of the conversation."""
        self._most = SMALL + TIMES * characters
        self._room, self._unclocked = self._most, 0
        self._until = time.thread_time() + MOST_SECONDS

    def measured(self, value: Any) -> Any:
        """Return the value. Raises TooMuch if it is too large."""
        self._spend(0)
        if type(value) is str:
            if len(value) > self._most:
                raise TooMuch(f"it makes a text of {len(value):,} characters; the limit is {self._most:,}")
        elif isinstance(value, int):
            if value.bit_length() > MOST_BITS:
                raise TooMuch(f"it makes a number of {value.bit_length():,} bits; the limit is {MOST_BITS}")
        elif _size(value, self._most) > self._most:
            raise TooMuch(f"it makes a value of more than {self._most:,} characters")
        return value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            if operator == "**" and abs(right) * left.bit_length() > MOST_BITS:
                raise TooMuch(f"it computes {left} ** {right}")
        elif operator == "*":
            for many, value in ((left, right), (right, left)):
                if isinstance(many, int):
                    self._check_product(many, value)
        elif operator == "%" and isinstance(left, str):
            self._check_format(left, right)
        return self.measured(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  as in jinja2
        # Count the plain text in a macro or a recursive loop: at most the template's size.
        turns = len(args[0]) if isinstance(__obj, LoopContext) and hasattr(args[0], "__len__") else 1
        __self._spend(turns * (__self._source_size if isinstance(__obj, (Macro, LoopContext)) else 1))
        name = str(getattr(__obj, "__name__", ""))
        __self._check_arguments(name, getattr(__obj, "__self__", None), args, kwargs)
        return __self.measured(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Any:
        if (wrapped := super().wrap_str_format(value)) is None:
            return None

        @functools.wraps(wrapped)
        def bounded(*args: Any, **kwargs: Any) -> str:
            self._check_format(value.__self__, [*args, *kwargs.values()])
            return str(wrapped(*args, **kwargs))

        return bounded

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MOST_SOURCE:
            raise TemplateError(f"it has {len(source):,} characters; the limit is {MOST_SOURCE:,}")
        self._source_size = len(source)
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            text = sum(len(data.data) for part in loop.body for data in _all(part, nodes.TemplateData))
            loop.iter = _filtered(loop.iter, _COUNTED, nodes.Const(1 + text))
        _replace(tree)
        return tree

    def _counted(self, values: Iterable[Any], cost: int) -> Iterator[Any]:
        """Yield the values of a loop and count each iteration."""
        for value in values:
            self._spend(cost)
            yield value

    def _joined(self, values: list[Any]) -> str:
        """Concatenate, as ``a ~ b``."""
        if sum(_size(value, self._most) for value in values) > self._most:
            raise TooMuch(f"it makes a text of more than {self._most:,} characters")
        return "".join(map(str, values))

    def _put_out(self, value: Any) -> Any:
        self._spend(_size(self.measured(value), self._most))
        return value

    def _spend(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            raise TooMuch(f"it makes more than {self._most:,} characters or loop iterations")
        self._unclocked += 1
        if self._unclocked > MOST_UNCLOCKED:
            self._unclocked = 0
            if time.thread_time() > self._until:
                raise TooMuch(f"it takes more than {MOST_SECONDS:.0f} s")

    def _check_product(self, times: int, value: Any) -> None:
        if times * _size(value, self._most) > self._most:
            raise TooMuch(f"it repeats something {times:,} times")

    def _check_format(self, text: str, values: Any) -> None:
        if _WIDE.search(text):
            raise TooMuch("it formats to a width above 999, or to a computed width")
        self._check_product(text.count("{") + text.count("%"), values)

    def _check_arguments(self, name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if name in _NOT_CALLED and isinstance(value, str):
            raise TooMuch(f"it calls {name}, which templates must not call")
        given = [*args, *kwargs.values()]
        numbers = [abs(one) for one in given if isinstance(one, int)]
        is_lookup = name in ("get", "index", "count", "pop") and isinstance(value, (list, dict))
        if name != "safe_range" and max(numbers, default=0) > LARGEST_NUMBER and not is_lookup:
            raise TooMuch(f"it calls {name} with {max(numbers):,}")
        if name in _GROWS:
            largest = max([1, *numbers, *(len(one) for one in given if isinstance(one, str))])
            self._check_product(largest, value)
            for items in (one for one in given if not isinstance(one, (str, int))):  # "x".join(items)
                self._check_product(_size(value, self._most), items)

    def _guarded(self, name: str, function: Any) -> Callable[..., Any]:
        """Wrap a filter or test to check its arguments and measure its result."""

        @functools.wraps(function)  # copies jinja2's attributes of the function too
        def guarded(*args: Any, **kwargs: Any) -> Any:
            at = 1 if hasattr(function, "jinja_pass_arg") else 0
            value = args[at]
            if name in _GROWS and isinstance(value, GeneratorType):
                value = list(self._counted(value, 1))
            self._check_arguments(name, self.measured(value), args[at + 1 :], kwargs)
            if name == "format":
                self._check_format(str(value), [*args[at + 1 :], *kwargs.values()])
            result = function(*args[:at], value, *args[at + 1 :], **kwargs)
            return self._counted(result, 1) if isinstance(result, GeneratorType) else self.measured(result)

        return guarded


def _size(value: Any, most: int) -> int:
    """Return the approximate characters of a value's text; counting stops at ``most``."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Namespace):
        value = object.__getattribute__(value, "_Namespace__attrs")
    if isinstance(value, Mapping):
        parts: Iterable[Any] = (part for pair in value.items() for part in pair)
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = value
    else:
        return 16
    size = 2
    for part in parts:
        size += _size(part, most - size)
        if size > most:
            break
    return size


def _filtered(value: Any, name: str, *arguments: nodes.Expr) -> Any:
    return nodes.Filter(value, name, list(arguments), [], None, None).set_lineno(value.lineno)


def _all(node: nodes.Node, kind: Any) -> Iterable[Any]:
    return [node] if isinstance(node, kind) else node.find_all(kind)


def _replace(node: nodes.Node) -> None:
    """Measure each ``~`` and each literal list, tuple and mapping below a node."""
    for name, value in list(node.iter_fields()):
        measured = [_replaced(one) for one in value] if isinstance(value, list) else _replaced(value)
        setattr(node, name, measured)


def _replaced(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _replace(value)
    if isinstance(value, nodes.Concat):
        return _filtered(nodes.List(value.nodes).set_lineno(value.lineno), _JOINED)
    is_made = isinstance(value, (nodes.List, nodes.Dict)) or (isinstance(value, nodes.Tuple) and value.ctx == "load")
    return _filtered(value, _MEASURED) if is_made else value
