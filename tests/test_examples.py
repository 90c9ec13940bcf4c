"""Files of `examples/`: what they name is there, and their numbers fit together.

The systemd unit and the image are in `tests/loaderd/test_operations.py`.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from blockstore.units import parse_bytes
from loaderd.cli.commands import app
from loaderd.monitoring.server import MonitoringServer
from preprocess.__main__ import app as blockstore_app
from tests.daemons import ROOT
from tests.loaderd.statuses import status

EXAMPLES = ROOT / "examples"
VERSIONS = ("1.28", "1.31", "1.34")  # of Kubernetes
BESIDE_BYTES = 512 << 20  # interpreter and libraries of the daemon
FAKE = """#!/bin/sh
case "$(basename "$0")" in
    scontrol) printf 'node0\\nnode1\\n' ;;
    *) printf '%s\\n' "$0 $*" ; echo "$LOADERD_MEM $LOADERD_WORKERS" ;;
esac
"""


def objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / "kubernetes" / name).read_text()))


def serve_options() -> dict[str | None, Any]:
    params = typer.main.get_command(app).commands["serve"].params  # type: ignore[attr-defined]
    return {p.envvar: p for p in params}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["daemon.yaml", "train.yaml"])
def test_kubernetes_accepts_the_objects(name: str, version: str):
    validator = pytest.importorskip("kubernetes_validate")
    for found in objects(name):
        validator.validate(found, version, strict=True)
    broken = objects(name)[-1]
    broken["spec"]["template"]["spec"]["containers"][0]["resources"]["limit"] = {}
    with pytest.raises(validator.ValidationError, match="limit"):
        validator.validate(broken, version, strict=True)


def test_the_daemon_set_serves_within_its_limits():
    (found,) = objects("daemon.yaml")
    pod = found["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {e["name"]: e["value"] for e in container["env"]}
    assert environment.keys() <= serve_options().keys()
    limit = parse_bytes(container["resources"]["limits"]["memory"].removesuffix("i"))
    assert limit >= parse_bytes(environment["LOADERD_MEM"]) + BESIDE_BYTES
    assert (
        container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
    )
    (port,) = container["ports"]
    assert str(port["containerPort"]) == environment["LOADERD_METRICS_PORT"]
    with MonitoringServer("127.0.0.1", 0, status) as server:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["port"] == port["name"]
            assert server.answer(container[probe]["httpGet"]["path"])[0] == 200
    mounted = {m["mountPath"] for m in container["volumeMounts"]}
    for name in ("LOADERD_STORE", "LOADERD_ENDPOINT"):
        path = Path(environment[name].removeprefix("ipc://"))
        assert mounted & set(map(str, path.parents))
    words = shlex.split(pod["initContainers"][1]["command"][-1])
    commands = typer.main.get_command(blockstore_app).commands  # type: ignore[attr-defined]
    assert words[words.index("blockstore") + 1] in commands
    assert words[-1] == environment["LOADERD_STORE"]


def test_trainers_of_a_node_find_its_daemon():
    (daemons,), (service, job) = objects("daemon.yaml"), objects("train.yaml")
    served = daemons["spec"]["template"]["spec"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = container["command"]
    options = {e["name"]: e["value"] for e in served["containers"][0]["env"]}
    assert options["LOADERD_ENDPOINT"] in words
    folders = [
        {v["name"]: v.get("hostPath") for v in p["volumes"]}["socket"] for p in (served, pod)
    ]
    assert folders[0]["path"] == folders[1]["path"]
    assert pod["securityContext"]["runAsUser"] == served["securityContext"]["runAsUser"]
    assert pod["nodeSelector"] == served["nodeSelector"]
    assert f"--nnodes={job['spec']['completions']}" in words
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    assert f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']}" in words
    assert f"--master-addr={job['metadata']['name']}-0.{service['metadata']['name']}" in words
    assert f"--master-port={service['spec']['ports'][0]['port']}" in words
    check_train_options(words[words.index("clients.train") + 2 :])


def check_train_options(words: list[str]) -> None:
    """Raises AssertionError: `clients.train` has no such option."""
    help_text = (ROOT / "clients/settings.py").read_text() + (ROOT / "clients/train.py").read_text()
    for word in words:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            assert re.search(rf"^    {name}: ", help_text, re.MULTILINE), word


def test_the_slurm_job_starts_ranks_on_each_node(tmp_path: Path):
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text(FAKE)
        (tmp_path / name).chmod(0o755)
    script = EXAMPLES / "slurm/train.sbatch"
    done = subprocess.run(
        ["bash", str(script)], capture_output=True, text=True, timeout=20, check=False,
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "STORE": "/data/store",
            "CHECKPOINT": "/shared/train.pt",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    command, settings = done.stdout.splitlines()
    words = shlex.split(command)
    assert words[0].endswith("srun")
    assert "--nnodes=2" in words
    assert "--rdzv-endpoint=node0:29500" in words
    at = words.index("clients.train")
    assert words[at + 1] == "/data/store"
    check_train_options(words[at + 2 :])
    given = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script.read_text(), re.MULTILINE))
    mem, workers = settings.split()
    ranks = int(given["gpus-per-node"])
    assert f"--nproc-per-node={ranks}" in words
    assert parse_bytes(mem) + ranks * (16 << 30) + (8 << 30) == parse_bytes(given["mem"])
    assert int(workers) + 4 * ranks == int(given["cpus-per-task"])
    assert {"LOADERD_MEM", "LOADERD_WORKERS", "LOADERD_LOG_FORMAT"} <= serve_options().keys()


def test_ray_trains_with_a_daemon_a_node(small_graph: Path, tmp_path: Path):
    pytest.importorskip("ray.train.torch", exc_type=ImportError)
    store = tmp_path / "store"
    subprocess.run(
        [sys.executable, "-m", "preprocess", "ingest", str(small_graph), str(store),
         "--no-summary"],
        cwd=ROOT, check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "ray_train.py"), str(store), "--mem", "64M",
         "--epochs", "2", "--storage", str(tmp_path / "runs")],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "'epoch': 1" in done.stdout.splitlines()[-1]
    assert list((tmp_path / "runs").rglob("state.pt"))
