"""Service levels: what is read, what NVSHMEM is told, what a socket gets. And that docs/settings.md is complete."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common import OneRank, error_of
from deep_ep import env
from deep_ep.buffers import engines
from deep_ep.control import Control
from deep_ep.topology import Topology
from deep_ep.transport import WindowSizes, service

ROOT = Path(__file__).parents[2]
NORMAL, LOW_LATENCY = env.SERVICE_LEVEL.name, env.LOW_LATENCY_SERVICE_LEVEL.name


def levels(monkeypatch: pytest.MonkeyPatch, **variables: str) -> tuple[int | None, int | None]:
    """Of normal and of low-latency traffic."""
    for name in (NORMAL, LOW_LATENCY):
        monkeypatch.delenv(name, raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    return service.service_level(False), service.service_level(True)


def test_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels(monkeypatch) == (None, None)
    assert levels(monkeypatch, **{NORMAL: "3"}) == (3, 3)
    assert levels(monkeypatch, **{LOW_LATENCY: "0"}) == (None, 0)
    assert levels(monkeypatch, **{NORMAL: "3", LOW_LATENCY: "15"}) == (3, 15)


@pytest.mark.parametrize("text", ["16", "-1", "low"])
def test_what_is_no_level(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, said = error_of(levels, monkeypatch, **{NORMAL: text})
    assert kind == "ValueError"
    assert said.startswith(f"{NORMAL}: cannot read {text!r}")


def test_what_nvshmem_is_told() -> None:
    """Its level, and RoCE's byte where there is one. What is set already stays."""
    told: dict[str, str] = {}
    service.pass_on(None, told)
    assert told == {}
    service.pass_on(3, told)
    assert told == {"NVSHMEM_IB_SL": "3", "NVSHMEM_IB_TRAFFIC_CLASS": "96"}
    service.pass_on(5, told)  # a second buffer, of the other kind
    assert told["NVSHMEM_IB_SL"] == "3"
    beyond: dict[str, str] = {"NVSHMEM_IB_SL": "1"}
    service.pass_on(9, beyond)
    assert beyond == {"NVSHMEM_IB_SL": "1"}


class Told(Exception):
    pass


def test_a_gpu_buffer_of_several_nodes_tells_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is made that could start it; a buffer with low-latency calls takes their level."""

    def tell(level: int | None) -> None:
        raise Told(level)

    def make(low_latency_bytes: int) -> None:
        sizes, topology = WindowSizes(0, 0, 0, low_latency_bytes), Topology(rank=0, num_ranks=2, ranks_per_node=1)
        engines.make_engine(Control(None, OneRank(), 1.0), None, torch.device("cuda"), sizes, 1.0, topology=topology)

    levels(monkeypatch, **{NORMAL: "3", LOW_LATENCY: "5"})
    monkeypatch.setattr(service, "pass_on", tell)
    assert error_of(make, 0) == ("Told", "3")
    assert error_of(make, 128) == ("Told", "5")


@contextlib.contextmanager
def connection() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        yield one


def marks(one: socket.socket) -> tuple[int, int]:
    priority = one.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY)
    return one.getsockopt(socket.IPPROTO_IP, socket.IP_TOS), priority


@pytest.mark.parametrize(("level", "expected"), [(None, (0, 0)), (3, (96, 3)), (6, (192, 6)), (8, (0, 0))])
def test_marks_of_a_socket(level: int | None, expected: tuple[int, int]) -> None:
    with connection() as one:
        service.mark(one, level)
        assert marks(one) == expected


def test_the_page_of_settings_lists_every_variable() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    ours = [variable.name for variable in env.VARIABLES if variable.name.startswith("DEEP_EP_")]
    assert [name for name in ours if f"| `{name}` |" not in page] == []
    assert [variable.name for variable in env.VARIABLES if f"`{variable.name}`" not in page] == []
