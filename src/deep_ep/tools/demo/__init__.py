"""`python -m deep_ep demo`: one MoE layer over a few ranks, shown step by step and checked.

Every rank makes its own tokens and routes them with a made-up router. The tokens are dispatched, small experts run on
the received rows, and combine brings the sums back. The first process then computes the same layer alone, without any
communication, and compares. Everything random follows from the seed, so no input has to be sent anywhere.

`layer` is the layer itself, `ranks` what each rank does with it, `show` what is printed, `plot` the picture, and
`traffic` what those two have in common.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from ... import env
from ..mps import shared_gpu
from ..plotting import require_matplotlib
from ..terminal import require_device, require_folder, require_positive
from . import show
from .layer import Shape
from .plot import write_plot

_DEFAULT_EXPERTS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `demo`."""
    parser.add_argument("--ranks", type=int, default=4, help="processes, each of which owns some of the experts")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each rank")
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size")
    parser.add_argument(
        "--experts",
        type=int,
        default=argparse.SUPPRESS,  # so that the help does not say None
        help=f"experts in all, a multiple of the ranks (default: {_DEFAULT_EXPERTS}, rounded up to one)",
    )
    parser.add_argument("--topk", type=int, default=8, help="experts that each token is sent to")
    parser.add_argument("--seed", type=int, default=0, help="for tokens, routes and experts")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the ranks, which may share a GPU")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, and nothing else")
    parser.add_argument(
        "--plot", type=Path, default=argparse.SUPPRESS, metavar="PATH.png", help="write the traffic as a picture, too"
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo.

    Returns:
        0 if the results are right, else 1.

    Raises:
        ValueError: An option is wrong.
        EPError: The ranks could not run.
    """
    shape = _shape_of(args)
    require_device("demo", shape.device)
    plot_path: Path | None = getattr(args, "plot", None)
    if plot_path is not None:
        _require_plot(plot_path)
    console = Console(highlight=False, quiet=args.json)
    show.show_title(console, shape)
    with shared_gpu(shape.num_ranks) if shape.device == "cuda" else nullcontext():
        results = show.run_with_progress(console, shape)
    show.show_traffic(console, shape, results)
    show.show_received(console, shape, results)
    ok = show.show_check(console, shape, results)
    show.show_bandwidth(console, shape, results)
    if plot_path is not None:
        write_plot(plot_path, shape, results)
        console.print(f"\nWrote {plot_path}", soft_wrap=True)
    if env.TRACE.get():
        console.print(
            f"\nRecorded in {env.TRACE.get()}. See it: python -m deep_ep report {env.TRACE.get()}", soft_wrap=True
        )
    if args.json:
        print(show.as_json(shape, results, ok))
    return 0 if ok else 1


def _shape_of(args: argparse.Namespace) -> Shape:
    require_positive("demo", ranks=args.ranks, tokens=args.tokens, hidden=args.hidden, topk=args.topk)
    default_experts = -(-_DEFAULT_EXPERTS // args.ranks) * args.ranks
    num_experts = getattr(args, "experts", default_experts)
    if num_experts < 1 or num_experts % args.ranks:
        raise ValueError(f"demo: --experts must be a multiple of --ranks ({args.ranks}), got {num_experts}")
    if args.topk > num_experts:
        raise ValueError(f"demo: --topk must be at most the number of experts ({num_experts}), got {args.topk}")
    return Shape(args.ranks, args.tokens, args.hidden, num_experts, args.topk, args.seed, args.device)


def _require_plot(path: Path) -> None:
    require_matplotlib("demo")
    if path.suffix.lower() != ".png":
        raise ValueError(f"demo: --plot must name a .png file, got {path}")
    require_folder("demo", path)
