"""The wheel of this tree, installed: an environment with what it declares and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]


def build_wheel(folder: Path) -> Path:
    """Build the wheel, without a network."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


def requirements_of(wheel: Path) -> list[str]:
    """What it declares."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])


def closure(requirements: Iterable[str]) -> dict[str, metadata.Distribution]:
    """The distributions of this environment that these requirements need, and those that they need, by name."""
    from packaging.requirements import Requirement  # hatchling and pytest bring it

    found: dict[str, metadata.Distribution] = {}
    pending = [(Requirement(text), {""}) for text in requirements]
    while pending:
        requirement, extras = pending.pop()
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name not in found:
            found[name] = metadata.distribution(name)
            assert requirement.specifier.contains(found[name].version, prereleases=True), requirement
            wanted = {"", *requirement.extras}
            pending += [(Requirement(text), wanted) for text in found[name].requires or []]
    return found


def link(distribution: metadata.Distribution, site: Path) -> None:
    """Have a distribution in another environment, too."""
    for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
        target = site / top
        if not target.exists():
            target.symlink_to(Path(str(distribution.locate_file(top))).resolve())


def make_environment(folder: Path, wheel: Path) -> Path:
    """A virtual environment of the wheel and what it declares. Returns its interpreter."""
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for distribution in closure(requirements_of(wheel)).values():
        link(distribution, site)
    return folder / "bin" / "python"


def start(command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen:
    """A program in a folder that knows nothing of this tree, with an environment that knows nothing of it, either."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LANG") if name in os.environ}
    return subprocess.Popen(
        list(command),
        cwd=folder,
        env={**kept, "PYTHONNOUSERSITE": "1", **(env or {})},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
