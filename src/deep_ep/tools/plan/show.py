"""Plans, comparisons and validations as tables, as JSON, and as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable

from ...planner.plan import ModePlan, Plan, SizePlan
from ...planner.table import Prediction
from ...planner.validate import Checked, Family, Score, over_families
from ..plotting import new_figure, write_picture
from ..terminal import plain_table
from .calibrate import Trial

_COLOURS = {"latency": "#7f7f7f", "link": "#1f77b4", "network": "#d62728", "SMs": "#2ca02c"}


def _columns(*names: str, left: int = 1) -> RichTable:
    table = plain_table()
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index < left else "right", no_wrap=True)
    return table


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _interval(prediction: Prediction) -> str:
    return f"{_us(prediction.us)} [{_us(prediction.low_us)}, {_us(prediction.high_us)}]"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


# Plans ---------------------------------------------------------------------------------------------------------------


def plan_table(plan: Plan) -> RichTable:
    """A line for each number of ranks and mode; the recommended mode has a star."""
    table = _columns(
        "ranks", "mode", "SMs", "dispatch us [80%]", "dispatch bound", "combine us [80%]", "combine bound",
        "link MB", "network MB", "layer us", "bound by", "tokens/s", left=2,
    )  # fmt: skip
    for size in plan.sizes:
        for one in size.modes:
            table.add_row(*_plan_cells(size, one))
    return table


def _plan_cells(size: SizePlan, one: ModePlan) -> list[str]:
    star = "*" if one is size.best else ""
    return [
        f"{size.num_ranks} ({size.num_nodes} x {size.num_ranks // size.num_nodes})",
        f"{one.mode.replace('_', '-')}{star}",
        str(one.num_sms or "-"),
        _interval(one.dispatch),
        one.dispatch.bound,
        _interval(one.combine),
        one.combine.bound,
        f"{link_MB(one):.1f}",
        f"{network_MB(one):.1f}",
        _us(one.layer.us),
        one.layer.bound,
        f"{one.layer.tokens_per_s:,.0f}",
    ]


def link_MB(one: ModePlan) -> float:
    """Megabytes that the busiest rank receives over links, in a dispatch and a combine."""
    return float(one.dispatch_traffic.link_bytes.max() + one.combine_traffic.link_bytes.max()) / 1e6


def network_MB(one: ModePlan) -> float:
    """Megabytes of the busiest rank's network interface in a dispatch and a combine, of its busier direction."""
    both = [
        max(float(traffic.network_in_bytes.max()), float(traffic.network_out_bytes.max()))
        for traffic in (one.dispatch_traffic, one.combine_traffic)
    ]
    return sum(both) / 1e6


def recommendations(plan: Plan) -> list[str]:
    """A sentence for each number of ranks."""
    lines = []
    for size in plan.sizes:
        best = size.best
        sms = f" with {best.num_sms} SMs" if best.num_sms else ""
        limit = plan.question.topk_groups if plan.question.num_groups > 1 else 0
        groups = f", {limit} of {plan.question.num_groups} groups" if limit else ""
        if size.placement is not None and size.rank_load_before > 1.01:
            groups += f", replicas (busiest rank {size.rank_load_before:.2f}x to {size.rank_load:.2f}x the mean)"
        mode, buffers = best.mode.replace("_", "-"), best.buffer_bytes / 2**20
        reasons = "; ".join(size.reasons)
        lines.append(f"{size.num_ranks} ranks: {mode}{sms}{groups}, {buffers:,.0f} MiB of buffers: {reasons}.")
    return lines + [f"{num_ranks} ranks: no answer: {reason}." for num_ranks, reason in plan.left_out]


def compare_table(plans: Sequence[Plan], names: Sequence[str]) -> RichTable:
    """Two plans beside each other, for the numbers of ranks that both have."""
    first, second = ({size.num_ranks: size for size in plan.sizes} for plan in plans)
    table = _columns(
        "ranks", *(f"{name}: {what}" for name in names for what in ("mode", "dispatch + combine us", "tokens/s")),
        "calls", "tokens/s",
    )  # fmt: skip
    for num_ranks in [size for size in first if size in second]:
        one, other = first[num_ranks].best, second[num_ranks].best
        cells = [
            text
            for best in (one, other)
            for text in (best.mode.replace("_", "-"), _us(best.us), f"{best.layer.tokens_per_s:,.0f}")
        ]
        ratio = other.layer.tokens_per_s / one.layer.tokens_per_s
        table.add_row(str(num_ranks), *cells, f"{other.us / one.us:.2f}x", f"{ratio:.2f}x")
    return table


def plan_json(plan: Plan) -> dict[str, Any]:
    """Everything that the table has, and the bytes of every rank's busiest links."""
    return {
        "phase": plan.question.phase,
        "gpu": plan.question.cluster.gpu,
        "network": plan.question.cluster.network,
        "tokens": plan.question.num_tokens,
        "sizes": [_size_json(size) for size in plan.sizes],
        "left_out": [{"ranks": num_ranks, "reason": reason} for num_ranks, reason in plan.left_out],
    }


def _size_json(size: SizePlan) -> dict[str, Any]:
    return {
        "ranks": size.num_ranks,
        "nodes": size.num_nodes,
        "recommended": size.best.mode,
        "reasons": size.reasons,
        "rank_load": size.rank_load,
        "rank_load_without_replicas": size.rank_load_before,
        "group_gain": size.group_gain,
        "weight_bytes": size.weight_bytes,
        "modes": [_mode_json(one) for one in size.modes],
    }


def _mode_json(one: ModePlan) -> dict[str, Any]:
    return {
        "mode": one.mode,
        "num_sms": one.num_sms,
        "buffer_bytes": one.buffer_bytes,
        "fits": one.is_possible,
        "dispatch": _prediction_json(one.dispatch),
        "combine": _prediction_json(one.combine),
        "link_MB": link_MB(one),
        "network_MB": network_MB(one),
        "layer": one.layer._asdict(),
    }


def _prediction_json(prediction: Prediction) -> dict[str, Any]:
    entry = prediction.entry
    return {
        "us": prediction.us,
        "low_us": prediction.low_us,
        "high_us": prediction.high_us,
        "bound": prediction.bound,
        "parts_us": prediction.parts,
        "constants_from": prediction.level,
        "num_points": entry.num_points if entry else 0,
        "sources": list(entry.sources) if entry else [],
    }


def draw_plans(plans: Sequence[Plan], names: Sequence[str], path: Path) -> None:
    """Times with their intervals, bytes, and tokens per second over the number of ranks."""
    figure = new_figure(11, 3.6, 110)
    times, sizes, rates = figure.subplots(1, 3)
    for style, plan, name in zip(("-", "--"), plans, names, strict=False):
        ranks = [size.num_ranks for size in plan.sizes]
        for op, colour in (("dispatch", "#1f77b4"), ("combine", "#ff7f0e")):
            predicted = [getattr(size.best, op) for size in plan.sizes]
            times.plot(ranks, [one.us for one in predicted], style, color=colour, label=f"{op}, {name}")
            low, high = [one.low_us for one in predicted], [one.high_us for one in predicted]
            times.fill_between(ranks, low, high, color=colour, alpha=0.15, linewidth=0)
            for size, one in zip(plan.sizes, predicted, strict=True):
                times.plot([size.num_ranks], [one.us], "o", color=_COLOURS[one.bound], markersize=5)
        sizes.plot(ranks, [link_MB(size.best) for size in plan.sizes], style, color="#1f77b4", label=f"links, {name}")
        network = [network_MB(size.best) for size in plan.sizes]
        sizes.plot(ranks, network, style, color="#d62728", label=f"network, {name}")
        rates.plot(ranks, [size.best.layer.tokens_per_s for size in plan.sizes], style, color="black", label=name)
    titles = ("us of a call; dots: what bounds it", "MB of the busiest rank", "tokens/s of all ranks")
    for axes, title in zip((times, sizes, rates), titles, strict=True):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("ranks")
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=6)
        axes.grid(alpha=0.3)
    times.set_yscale("log")
    rates.set_yscale("log")
    for bound, colour in _COLOURS.items():
        times.plot([], [], "o", color=colour, label=bound, markersize=5)
    times.legend(fontsize=6)
    write_picture("plan", figure, path)


# Validation ----------------------------------------------------------------------------------------------------------


def family_table(scores: dict[Family, Score], fewest: int = 1) -> RichTable:
    """A line for each family."""
    table = _columns("system", "GPU", "network", "points", "median", "90th percentile", "inside 80%", left=3)
    for family, one in scores.items():
        if one.num_points >= fewest:
            cells = [_percent(one.median), _percent(one.p90), f"{100 * one.coverage:.0f}%"]
            table.add_row(*(name or "-" for name in family), str(one.num_points), *cells)
    return table


def summary_line(title: str, scores: dict[Family, Score]) -> str:
    """Medians over the families of at least ten points."""
    number, one = over_families(scores)
    return (
        f"{title}: median {_percent(one.median)}, 90th percentile {_percent(one.p90)}, inside the 80% interval "
        f"{100 * one.coverage:.0f}% (medians over {number} families of at least 10 points, {one.num_points} points)"
    )


def scores_json(scores: dict[Family, Score]) -> dict[str, Any]:
    """The same as JSON."""
    number, one = over_families(scores)
    families = [dict(zip(("system", "gpu", "network"), family, strict=True)) | score._asdict()
                for family, score in scores.items()]  # fmt: skip
    return {"num_families": number, "over_families": one._asdict(), "families": families}


def draw_scatter(checked: dict[str, list[Checked]], path: Path) -> None:
    """Predicted against actual, a panel for each way of leaving points out."""
    figure = new_figure(3.4 * len(checked), 3.4, 100)
    panels = figure.subplots(1, len(checked), squeeze=False)[0]
    for axes, (title, points) in zip(panels, checked.items(), strict=True):
        for bound, colour in _COLOURS.items():
            some = [one for one in points if one.prediction.bound == bound]
            actual, predicted = [one.point.latency_us for one in some], [one.prediction.us for one in some]
            # Thousands of points as paths would be megabytes: they are drawn into an image inside the SVG.
            axes.plot(actual, predicted, ".", color=colour, markersize=2, alpha=0.5, label=bound, rasterized=True)
        ends = [min(one.point.latency_us for one in points), max(one.point.latency_us for one in points)]
        axes.plot(ends, ends, color="black", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("published us")
        axes.set_ylabel("predicted us")
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=6, markerscale=4)
    write_picture("plan", figure, path)


def trial_table(trials: Sequence[Trial]) -> RichTable:
    """Measured calls beside what the others predict."""
    table = _columns(
        "case", "network", "nodes x ranks", "tokens", "measured us", "predicted us [80%]", "error", left=2
    )  # fmt: skip
    for trial in trials:
        call = trial.point.call
        error = trial.us / trial.point.latency_us - 1
        table.add_row(
            trial.point.id,
            call.network or call.gpu,
            f"{call.num_nodes} x {call.ranks_per_node}",
            str(call.num_tokens),
            _us(trial.point.latency_us),
            f"{_us(trial.us)} [{_us(trial.low_us)}, {_us(trial.high_us)}]",
            f"{100 * error:+.0f}%",
        )
    return table
