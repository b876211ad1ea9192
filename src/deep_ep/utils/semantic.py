"""Two small conveniences: a default for `None`, and a method cache that lets its objects die."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

Value = TypeVar("Value")
Owner = TypeVar("Owner")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Method = Callable[Concatenate[Owner, Parameters], Result]


def value_or(value: Value | None, default: Value) -> Value:
    """`value`, or `default` where it is `None` (0, empty and false values are values)."""
    return default if value is None else value


def weak_lru(
    maxsize: int | None = 128, typed: bool = False
) -> Callable[[Method[Owner, Parameters, Result]], Method[Owner, Parameters, Result]]:
    """A decorator for methods: `functools.lru_cache`, one for each object, that lets the object die.

    `lru_cache` on a method holds every `self` it has seen until it is evicted, and with it what the object
    owns. Here the cache belongs to the object and goes with it, unless a cached result refers to the object.

    Args:
        maxsize: Results kept for each object; `None` for all.
        typed: Whether arguments of different types count as different, as in `lru_cache`.
    """

    def decorate(method: Method[Owner, Parameters, Result]) -> Method[Owner, Parameters, Result]:
        caches: weakref.WeakKeyDictionary[Owner, Callable[..., Result]] = weakref.WeakKeyDictionary()

        def make_cache(owner: Owner) -> Callable[..., Result]:
            weak_owner = weakref.ref(owner)

            @functools.lru_cache(maxsize, typed)
            def call(*args: Any, **kwargs: Any) -> Result:
                alive = weak_owner()
                assert alive is not None, "weak_lru: the caller holds the object during the call"
                return method(alive, *args, **kwargs)

            return call

        @functools.wraps(method)
        def wrapper(self: Owner, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            cache = caches.get(self)
            if cache is None:
                cache = caches[self] = make_cache(self)
            return cache(*args, **kwargs)

        return wrapper

    return decorate
