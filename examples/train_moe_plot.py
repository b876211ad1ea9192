"""The picture of a training run: the loss, and how evenly the experts were used."""

from __future__ import annotations

from pathlib import Path

import torch

from deep_ep.tools.plotting import new_figure, write_png


def write_plot(path: Path, title: str, losses: list[float], loads: torch.Tensor, entropy: float) -> None:
    """Draw the loss curve above a heat map of the experts' load.

    Args:
        path: The PNG file.
        title: What was trained.
        losses: Of each step, in nats a letter.
        loads: [steps, layers, E], how many selections each expert got.
        entropy: Of a letter, if nothing is known about those before it.
    """
    figure = new_figure(8.0, 5.5, 90)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    upper.plot(losses, color="#1f4e8c", linewidth=2, label="loss of a step")
    upper.axhline(entropy, color="#b03030", linestyle="--", linewidth=1, label="unigram entropy of the text")
    upper.set_ylabel("nats a letter")
    upper.set_ylim(bottom=0)
    upper.set_title(title, fontsize=10)
    upper.legend(frameon=False, fontsize=9)

    share = loads.double() / loads.double().mean(2, keepdim=True).clamp(min=1e-9)
    num_steps, num_layers, num_experts = share.shape
    image = lower.imshow(
        share.flatten(1).T, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=2, origin="lower"
    )
    lower.set_yticks([num_experts * (layer + 0.5) - 0.5 for layer in range(num_layers)])
    lower.set_yticklabels([f"layer {layer}\n{num_experts} experts" for layer in range(num_layers)])
    for layer in range(1, num_layers):
        lower.axhline(layer * num_experts - 0.5, color="white", linewidth=2)
    lower.set_xlabel("step")
    lower.set_xlim(-0.5, num_steps - 0.5)
    figure.colorbar(image, ax=lower, label="load / even load")
    write_png("train_moe", figure, path)
