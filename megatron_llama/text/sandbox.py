"""Jinja for templates of strangers: no access to Python, as jinja2's sandbox has it, and bounds on time and size.

Every value that a template makes is measured when it is made, and no operation may make one from measured values that
is much larger than they are. Between two measurements only quick things happen, so a clock that is read at each of
them, at each turn of a loop and at each call bounds the time.
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
"""Characters of a template; the longest published ones have 20,000."""
MOST_SECONDS = 5.0
"""Processor time of a rendering; a usual one takes less than a millisecond."""
MOST_UNCLOCKED = 50
"""Measurements from one look at the clock to the next, which takes as long as many of them."""
SMALL, TIMES = 1 << 20, 64
"""A value, and the whole output, may have SMALL characters and TIMES those of what is rendered."""
LARGEST_NUMBER = 10_000
"""As an argument: a width, an indentation, a number of repetitions."""
MOST_BITS = 256
"""Of a number."""
_WIDE = re.compile(r"\*|\d{4}")
_GROWS = ("replace", "join", "indent", "expandtabs", "wordwrap", "xmlattr")
"""What multiplies the size of a value by that of an argument."""
_LEFT_OUT = ("lipsum", "urlize", "striptags", "sum")
_NOT_CALLED = ("encode", "translate", "maketrans")
"""Slow, or without a bound, and in no template of a chat."""
_COUNTED, _JOINED, _MEASURED = "_counted", "_joined", "_measured"


class TooMuch(TemplateRuntimeError):
    """A template passed a bound."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounds; ``start`` begins a rendering."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(
        self, filters: Mapping[str, Callable[..., Any]], functions: Mapping[str, Callable[..., Any]], **options: Any
    ) -> None:
        """``filters`` and ``functions`` are added to jinja2's."""
        # Not optimized: constant expressions would be computed, unmeasured, while a template is compiled.
        super().__init__(optimized=False, finalize=self._put_out, **options)
        for name in _LEFT_OUT:
            self.globals.pop(name, None)
        self.globals.update(functions)
        kept: dict[str, Any] = {**self.filters, **filters}
        self.filters: dict[str, Any] = {
            name: self._guarded(name, function) for name, function in kept.items() if name not in _LEFT_OUT
        }
        self.tests = {name: self._guarded(name, function) for name, function in self.tests.items()}
        self.filters |= {_COUNTED: self._counted, _JOINED: self._joined, _MEASURED: self.measured}
        self._source_size = 0
        self.start(0)

    def start(self, characters: int) -> None:
        """Begins to count; ``characters`` are those of the conversation."""
        self._most = SMALL + TIMES * characters
        self._room, self._unclocked = self._most, 0
        self._until = time.thread_time() + MOST_SECONDS

    def measured(self, value: Any) -> Any:
        """The value. Raises TooMuch where it is too large."""
        self._spend(0)
        if type(value) is str:
            if len(value) > self._most:
                raise TooMuch(f"it makes a text of {len(value):,} characters, and {self._most:,} are the most")
        elif isinstance(value, int):
            if value.bit_length() > MOST_BITS:
                raise TooMuch(f"it makes a number of {value.bit_length():,} bits, and {MOST_BITS} are the most")
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
        # The plain text in a macro or a recursive loop is counted here: at most the whole template's.
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
            raise TemplateError(f"it has {len(source):,} characters, and {MOST_SOURCE:,} are the most")
        self._source_size = len(source)
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            text = sum(len(data.data) for part in loop.body for data in _all(part, nodes.TemplateData))
            loop.iter = _filtered(loop.iter, _COUNTED, nodes.Const(1 + text))
        _replace(tree)
        return tree

    def _counted(self, values: Iterable[Any], cost: int) -> Iterator[Any]:
        """The values of a loop, each turn counted."""
        for value in values:
            self._spend(cost)
            yield value

    def _joined(self, values: list[Any]) -> str:
        """``a ~ b``."""
        if sum(_size(value, self._most) for value in values) > self._most:
            raise TooMuch(f"it makes a text of more than {self._most:,} characters")
        return "".join(map(str, values))

    def _put_out(self, value: Any) -> Any:
        self._spend(_size(self.measured(value), self._most))
        return value

    def _spend(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            raise TooMuch(f"it makes more than {self._most:,} characters, or turns of loops")
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
            raise TooMuch("it formats to a width of thousands, or to one that is computed")
        self._check_product(text.count("{") + text.count("%"), values)

    def _check_arguments(self, name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if name in _NOT_CALLED and isinstance(value, str):
            raise TooMuch(f"it calls {name}, which is not for templates")
        given = [*args, *kwargs.values()]
        numbers = [abs(one) for one in given if isinstance(one, int)]
        if name != "safe_range" and max(numbers, default=0) > LARGEST_NUMBER and not isinstance(value, (list, dict)):
            raise TooMuch(f"it calls {name} with {max(numbers):,}")
        if name in _GROWS:
            largest = max([1, *numbers, *(len(one) for one in given if isinstance(one, str))])
            self._check_product(largest, value)
            for items in (one for one in given if not isinstance(one, (str, int))):  # "x".join(items)
                self._check_product(_size(value, self._most), items)

    def _guarded(self, name: str, function: Any) -> Callable[..., Any]:
        """A filter or test that checks its arguments and measures its result."""

        @functools.wraps(function)  # jinja2's own marks on the function too
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
    """About the characters that a value has when it is written; no more are counted than ``most``."""
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
    """Has each ``~``, and each list, tuple and mapping that is written out, measured."""
    for name, value in list(node.iter_fields()):
        found = [_replaced(one) for one in value] if isinstance(value, list) else _replaced(value)
        setattr(node, name, found)


def _replaced(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _replace(value)
    if isinstance(value, nodes.Concat):
        return _filtered(nodes.List(value.nodes).set_lineno(value.lineno), _JOINED)
    is_made = isinstance(value, (nodes.List, nodes.Dict)) or (isinstance(value, nodes.Tuple) and value.ctx == "load")
    return _filtered(value, _MEASURED) if is_made else value
