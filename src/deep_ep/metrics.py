"""Live diagnosis of a buffer: its statistics as OpenMetrics text, an HTTP endpoint for it, and verdicts on waits.

    from deep_ep import metrics

    print(metrics.openmetrics(buffer))
    endpoint = metrics.serve(buffer, port=9400)   # http://127.0.0.1:9400/metrics
    metrics.watch(buffer)                         # logger `deep_ep`: which rank the others wait for

Nothing of this is on unless it is called. It takes no lock of the buffer: also while a call waits, it answers.
"""

from __future__ import annotations

import http.server
import sys
import threading
import weakref
from collections.abc import Iterable
from typing import Any

from .buffers import checks
from .errors import EPClosed

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_POLL_SECS = 0.2  # how often an endpoint looks whether its buffer is still there
_ESCAPED = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})

_SUFFIXES = {"counter": "_total", "info": "_info"}  # of samples, behind the name of their family
_UNITS = ("bytes", "seconds")

Samples = Iterable[tuple[dict[str, Any], float]]


def openmetrics(buffer: Any) -> str:
    """Return what a buffer has done so far as OpenMetrics text, the format that Prometheus reads.

    Counters begin anew with a new generation of the buffer (`replace`), as after a restart.

    Args:
        buffer: A `Buffer`. It may have failed; then `deep_ep_working` is 0.

    Raises:
        EPClosed: The buffer was destroyed.
    """
    if buffer.runtime is None:
        raise EPClosed(f"openmetrics: the buffer was destroyed (rank {buffer.rank}/{buffer.group_size})")
    engine = buffer._engine
    stats, peers = engine.stats(), range(buffer.group_size)
    page = _Page({"rank": buffer.rank})
    facts = {"transport": buffer.transport, "device": buffer.device, "num_ranks": buffer.group_size}
    page.add("deep_ep_buffer", "info", "How the buffer reaches its peers.", [(facts, 1)])
    page.add("deep_ep_working", "gauge", "Whether calls can be made.", [({}, int(not engine.has_failed()))])
    page.add("deep_ep_generation", "gauge", "The generation of the buffer.", [({}, buffer.generation)])
    calls = [({"path": path}, count) for path, count in sorted(stats["calls"].items())]
    calls += [({"path": path}, count) for path, count in sorted(stats.get("low_latency", {}).items())]
    page.add("deep_ep_calls", "counter", "Calls, by operation and path.", calls)
    page.add("deep_ep_rounds", "counter", "Rounds of normal calls.", [({}, stats["rounds"])])
    for name, key, text in (
        ("deep_ep_sent_bytes", "bytes_to", "Bytes of rows that were sent to a peer."),
        ("deep_ep_received_bytes", "bytes_from", "Bytes of rows that came from a peer."),
        ("deep_ep_wait_seconds", "wait_secs", "Time that this rank has waited for a peer."),
    ):
        counts = [({"peer": peer}, stats[key][peer]) for peer in peers] if engine.counts_peers else []
        page.add(name, "counter", text, counts)
    arena = [({"state": state}, num_bytes) for state, num_bytes in sorted(stats["arena"].items())]
    page.add("deep_ep_arena_bytes", "gauge", "Memory of the window for received rows.", arena)
    masked = engine.masked_ranks()
    if masked is not None:
        page.add(
            "deep_ep_masked",
            "gauge",
            "Whether a peer is masked.",
            [({"peer": one}, int(one in masked)) for one in peers],
        )
    for links in ("rail", "mesh"):
        for what, count in sorted(stats.get(links, {}).items()):
            text = f"{what.replace('_', ' ').capitalize()} over the {links} between nodes."
            page.add(f"deep_ep_{links}_{_with_unit_last(what)}", "counter", text, [({}, count)])
    found = buffer._watch
    if found is not None:
        page.add("deep_ep_waits", "counter", "Waits for peers.", [({}, found.num_noted)])
        last = [({"peer": peer}, found.num_last[peer]) for peer in peers]
        page.add("deep_ep_waits_last", "counter", "Waits in which a peer came last.", last)
    return page.text()


def _with_unit_last(name: str) -> str:
    """`rows_bytes_sent` as `rows_sent_bytes`: a name ends with its unit."""
    parts = name.split("_")
    units = [part for part in parts if part in _UNITS]
    return "_".join([part for part in parts if part not in _UNITS] + units)


class _Page:
    """Metric families in OpenMetrics text.

    Args:
        labels: Labels of all samples.
    """

    def __init__(self, labels: dict[str, Any]):
        self._labels = labels
        self._lines: list[str] = []

    def add(self, name: str, kind: str, text: str, samples: Samples) -> None:
        """Add a family. One without samples is left out."""
        lines = [
            f"{name}{_SUFFIXES.get(kind, '')}{_labels({**self._labels, **labels})} {_number(value)}"
            for labels, value in samples
        ]
        if not lines:
            return
        unit = name.rsplit("_", 1)[-1]
        self._lines.append(f"# TYPE {name} {kind}")
        if unit in _UNITS:
            self._lines.append(f"# UNIT {name} {unit}")
        self._lines += [f"# HELP {name} {text.translate(_ESCAPED)}", *lines]

    def text(self) -> str:
        """The whole page."""
        return "\n".join([*self._lines, "# EOF", ""])


def _labels(labels: dict[str, Any]) -> str:
    return "{" + ",".join(f'{name}="{str(value).translate(_ESCAPED)}"' for name, value in labels.items()) + "}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.9g}"


class Endpoint:
    """An HTTP endpoint on loopback; `serve` makes it. It ends with its buffer.

    Attributes:
        port: Where it listens.
    """

    def __init__(self, buffer: Any, port: int):
        self._server = _Server(buffer, port)
        self.port: int = self._server.server_address[1]
        name = f"deep_ep-metrics-{buffer.rank}"
        self._thread = threading.Thread(target=self._server.run, name=name, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where Prometheus, or a browser, finds it."""
        return f"http://127.0.0.1:{self.port}/metrics"

    def close(self) -> None:
        """End it. A second call does nothing."""
        self._server.is_over = True
        self._thread.join()


class _Server(http.server.ThreadingHTTPServer):
    """Serves one buffer, which it does not keep alive.

    Attributes:
        is_over: It ends at its next look.
    """

    daemon_threads = True
    allow_reuse_address = True
    is_over = False

    def __init__(self, buffer: Any, port: int):
        self._buffer = weakref.ref(buffer)
        super().__init__(("127.0.0.1", port), _Handler)
        self.timeout = _POLL_SECS

    def run(self) -> None:
        """On the endpoint's thread: answer until the buffer is closed."""
        with self:
            while not self.is_over and self._is_open():
                self.handle_request()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that close their connection, or send nothing, in the middle of a request."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def _is_open(self) -> bool:
        buffer = self._buffer()
        return buffer is not None and buffer.runtime is not None

    def page(self) -> str:
        """Return what a request is answered with.

        Raises:
            EPClosed: The buffer is gone.
        """
        buffer = self._buffer()
        if buffer is None:
            raise EPClosed("metrics: the buffer is gone")
        return openmetrics(buffer)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers `GET /metrics`."""

    timeout = 5.0  # a client that sends nothing must not hold a thread for ever
    server: _Server

    def do_GET(self) -> None:
        """Send the page."""
        if self.path.split("?")[0] not in ("/", "/metrics"):
            self.send_error(404, "the page is /metrics")
            return
        try:
            page = self.server.page().encode()
        except EPClosed as error:
            self.send_error(503, str(error))
            return
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def serve(buffer: Any, port: int = 0) -> Endpoint:
    """Serve `openmetrics(buffer)` at `http://127.0.0.1:<port>/metrics`, on a daemon thread.

    It listens on loopback only: an agent on the host fetches it. It ends when the buffer is destroyed or collected.

    Args:
        buffer: A `Buffer`.
        port: The port; 0: any that is free, see `Endpoint.port`. Ranks of one host need different ones.

    Raises:
        OSError: The port is not free.
    """
    port = checks.check_int("metrics.serve", "port", port, 0)
    if port > 0xFFFF:
        raise ValueError(f"metrics.serve: `port` must be at most 65535, got {port}")
    buffer._require_open("metrics.serve")
    return Endpoint(buffer, port)


def watch(buffer: Any, num_waits: int = 1000, interval_secs: float = 60.0) -> None:
    """Have the logger `deep_ep` warn of a rank that the others wait for again and again.

    After every `num_waits` waits of this rank there is a verdict, if one other rank came last in most of them and a
    notable part of the time was spent waiting for it, or half of the time in fewer waits: "rank 2 came last in
    61% of the last 1,000 waits". Local.

    Args:
        buffer: A `Buffer` on the CPU; on a GPU kernels wait, and the host does not see it.
        num_waits: Waits between two verdicts; 0: no verdicts any more.
        interval_secs: Seconds between two verdicts on the same rank, at least.

    Raises:
        EPUnsupported: The device is a GPU.
    """
    num_waits = checks.check_int("metrics.watch", "num_waits", num_waits, 0)
    if not isinstance(interval_secs, (int, float)) or not interval_secs >= 0:
        raise ValueError(f"metrics.watch: `interval_secs` must be at least 0, got {interval_secs!r}")
    buffer._require_open("metrics.watch")
    buffer._watch_waits(num_waits, float(interval_secs))
