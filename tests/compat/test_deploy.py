"""The files for operators: what they name exists, and what they start runs, two hosts being two launchers here."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"

SRUN = """#!/usr/bin/env bash
# Stands in for Slurm's: the command once for each host, at the same time, each with its number and a name of its own.
[ "$1" = --kill-on-bad-exit=1 ] && shift
for node in 0 1; do
    SLURM_NODEID=$node DEEP_EP_HOST=host-$node "$@" &
    started+=($!)
done
for one in "${started[@]}"; do wait "$one" || exit 1; done
"""


def free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHON": sys.executable, "MASTER_PORT": free_port(), "FIRST_HOST": "127.0.0.1", **more}


def test_the_image_copies_what_exists() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    sources = [
        source for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE) for source in shlex.split(line)[:-1]
    ]
    assert "src" in sources
    for source in sources:
        assert (ROOT / source).exists(), source
    for base in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
        assert "/" not in base  # no registry is named


def manifest() -> dict[str, dict]:
    """The documents of the manifest, by kind."""
    yaml = pytest.importorskip("yaml")
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {document["kind"]: document for document in documents}


def test_the_manifest_agrees_with_itself() -> None:
    found = manifest()
    job, service = found["Job"], found["Service"]
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(variables["NODES"])
    assert pod["metadata"]["labels"] == service["spec"]["selector"]
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert variables["FIRST_HOST"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    for word in container["command"][1:]:
        assert (ROOT / word).exists()


@pytest.mark.parametrize("script", ["start_node.sh", "slurm.sbatch"])
def test_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", str(DEPLOY / script)], check=True, timeout=60)


def test_what_is_not_set_is_named() -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("NODE", "JOB_COMPLETION_INDEX")}
    done = subprocess.run([DEPLOY / "start_node.sh", "x.py"], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode != 0
    assert "set NODE, the number of this host" in done.stderr


@pytest.mark.cpu_only
@pytest.mark.exhaustive
def test_pods_of_the_job_reach_each_other() -> None:
    (container,) = manifest()["Job"]["spec"]["template"]["spec"]["containers"]
    shared = environment(NODES="2", RANKS="2")
    pods = [
        subprocess.Popen(
            container["command"],
            cwd=ROOT,
            env={**shared, "JOB_COMPLETION_INDEX": str(index), "DEEP_EP_HOST": f"pod-{index}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    said = [pod.communicate(timeout=120)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said
    assert "2 nodes of 2 ranks: all sums are right" in said[0]


@pytest.mark.cpu_only
@pytest.mark.exhaustive
def test_the_slurm_job(tmp_path: Path) -> None:
    for name, text in (("srun", SRUN), ("scontrol", "#!/usr/bin/env bash\necho 127.0.0.1\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = environment(
        PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_NNODES="2", SLURM_JOB_NODELIST="host-[0-1]", RANKS="2"
    )
    command = ["bash", "deploy/slurm.sbatch", "examples/two_nodes.py"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 nodes of 4 ranks: all sums are right" in done.stdout
