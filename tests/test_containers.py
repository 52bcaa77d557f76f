"""Container recipes, and the files for JobSet and SkyPilot, against the project and their pages; no engine is needed.

Compare new fields in ``tests/golden/containers`` with JobSet's CRD v1alpha2 (github.com/kubernetes-sigs/jobset,
charts/jobset/crds) and SkyPilot's sky/utils/schemas.py.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from megatron_llama.config import load_config
from megatron_llama.launch.environment import ProcessContext, process_context
from megatron_llama.system.exit_status import EXIT_RESTART, EXIT_USER
from tests.golden import GoldenFiles
from tests.paths import CONF, ROOT

JOB = yaml.safe_load((ROOT / "containers/jobset.yaml").read_text())
TASK = yaml.safe_load((ROOT / "containers/skypilot.yaml").read_text())
PAGE = (ROOT / "docs/getting-started/install.md").read_text()
DOCKERFILE = (ROOT / "containers" / "Dockerfile").read_text()
APPTAINER = (ROOT / "containers" / "Apptainer.def").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

ACTIONS = {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"}


def fields(node: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each field; "[]" is an item of a list."""
    if isinstance(node, list):
        for item in node:
            yield from fields(item, f"{path}[]")
    elif isinstance(node, dict):
        for key, value in node.items():
            name = f"{path}.{key}".lstrip(".")
            yield name
            yield from fields(value, name)


@pytest.mark.parametrize("name", ["jobset", "skypilot"])
def test_fields_are_those_of_the_schema(name: str) -> None:
    """No field is misspelled or in the wrong place: engines ignore such fields, or reject the file."""
    document = {"jobset": JOB, "skypilot": TASK}[name]
    GoldenFiles.check(f"containers/{name}.txt", "\n".join(sorted(set(fields(document)))))


def pod() -> dict[str, Any]:
    return job()["template"]["spec"]


def job() -> dict[str, Any]:
    (replicated,) = JOB["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    return replicated["template"]["spec"]


def container() -> dict[str, Any]:
    (only,) = pod()["containers"]
    return only


def pod_context(index: int) -> ProcessContext | None:
    """Return train.py's reading of the variables of pod ``index``."""
    environ = {}
    for entry in container()["env"]:
        field = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        environ[entry["name"]] = str(index) if "job-completion-index" in field else entry.get("value", "secret")
    return process_context(environ)


def assert_nodes(contexts: list[ProcessContext | None]) -> None:
    """Check that the processes are the nodes of one run, each of which starts its ranks."""
    for index, context in enumerate(contexts):
        assert context is not None and context.one_per_node
        assert (context.node, context.nodes, context.ranks_of_nodes(8 * len(contexts))[index]) == (
            *(index, len(contexts)),
            8,
        )
        assert contexts[0] is not None
        assert (context.master_addr, context.master_port) == (contexts[0].master_addr, 29500)


def test_pods_are_the_nodes_of_one_run() -> None:
    nodes = job()["completions"]
    assert (JOB["apiVersion"], JOB["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert job()["parallelism"] == nodes and job()["completionMode"] == "Indexed"
    assert_nodes([pod_context(index) for index in range(nodes)])
    name, replicated = JOB["metadata"]["name"], JOB["spec"]["replicatedJobs"][0]["name"]
    context = pod_context(1)
    assert context is not None and context.master_addr == f"{name}-{replicated}-0-0.{pod()['subdomain']}"
    assert {"containerPort": context.master_port} in container()["ports"]
    assert "MEGATRON_LLAMA_SECRET" in {entry["name"] for entry in container()["env"]}


def test_skypilots_nodes_are_the_nodes_of_one_run() -> None:
    contexts = []
    for index in range(TASK["num_nodes"]):
        variables = {
            **TASK["envs"],
            "SKYPILOT_NODE_RANK": str(index),
            "SKYPILOT_NUM_NODES": str(TASK["num_nodes"]),
            "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
            "PATH": "/usr/bin:/bin",
        }
        script = TASK["run"].replace("exec ", "env; : ")
        done = subprocess.run(["bash", "-ec", script], env=variables, capture_output=True, text=True, check=True)
        contexts.append(process_context(dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)))
    assert_nodes(contexts)
    assert contexts[1] is not None and contexts[1].master_addr == "10.0.0.1"


@pytest.mark.parametrize("text", [container()["args"][0], TASK["run"]], ids=["JobSet", "SkyPilot"])
def test_the_command_receives_signals_and_has_valid_settings(text: str) -> None:
    words = shlex.split(text.strip().splitlines()[-1].replace("$RUN", str(TASK["envs"]["RUN"])))
    assert words[0] == "exec", "a shell in between would not pass SIGTERM on"
    config = load_config(words[3:], CONF)
    assert str(config.run.dir).startswith("/runs/") and config.checkpoint.every_minutes


def test_restarts_follow_the_exit_status() -> None:
    policy = JOB["spec"]["failurePolicy"]
    assert {rule["action"] for rule in policy["rules"]} <= ACTIONS
    (named,) = [rule["onExitCodes"] for rule in job()["podFailurePolicy"]["rules"]]
    assert named["containerName"] == container()["name"] and {EXIT_RESTART, EXIT_USER} <= set(named["values"])
    assert pod()["restartPolicy"] == "Never" and job()["backoffLimit"] == 0

    def action(status: int) -> str:  # Kubernetes' message of a failed Job
        message = f"Container trainer for pod default/a failed with exit code {status} matching FailJob rule at index 0"
        matching = (
            rule["action"]
            for rule in policy["rules"]
            if any(re.search(pattern, message) for pattern in rule["onJobFailureMessagePatterns"])
        )
        return next(matching, "RestartJobSet")

    assert action(EXIT_RESTART) == "RestartJobSetAndIgnoreMaxRestarts" and action(EXIT_USER) == "FailJobSet"
    assert action(1) == "RestartJobSet" and policy["maxRestarts"] > 0
    recovery = TASK["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [EXIT_RESTART] and recovery["max_restarts_on_errors"] > 0


def test_memory_and_volumes_are_mounted() -> None:
    """The grace period allows a save."""
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container()["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory" and "persistentVolumeClaim" in mounts["/runs"]
    assert str(pod()["terminationGracePeriodSeconds"]) in PAGE
    slurm = re.search(r"--signal=B:USR1@(\d+)", (ROOT / "run.slurm").read_text())
    assert slurm is not None and pod()["terminationGracePeriodSeconds"] >= int(slurm[1])


# Images


def test_both_images_have_python_torch_and_packages_of_the_project() -> None:
    versions = {*re.findall(r"ARG PYTHON=(\S+)", DOCKERFILE), *re.findall(r"From: python:([\d.]+)-slim", APPTAINER)}
    least, below = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()  # type: ignore[union-attr]
    assert len(versions) == 1, "both recipes have the same Python"
    assert int(least) <= int(versions.pop().removeprefix("3.")) < int(below)
    (requirement,) = re.findall(r'"(torch[^"]+)"', DOCKERFILE)
    assert requirement in PROJECT["dependencies"]
    matches = [re.search(r"--no-install-recommends ([^\\\n]+)", text) for text in (DOCKERFILE, APPTAINER)]
    docker, apptainer = (sorted(match[1].split()) for match in matches if match)
    assert docker == apptainer
    assert {"g++", "make"} <= set(docker)
    last = re.findall(r"^USER (\S+)", DOCKERFILE, flags=re.MULTILINE)[-1]
    assert last not in ("0", "root") and f"--uid {last} " in DOCKERFILE


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_targets(target: str) -> None:
    assert f"FROM base AS {target}\n" in DOCKERFILE
    assert f"--target {target} -t megatron_llama:{target} ." in PAGE


def test_every_command_of_the_page_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for text in (DOCKERFILE, APPTAINER, PAGE):
        assert set(re.findall(r"(?<!g\+\+ )\bmake ([a-z-]+)", text)) <= targets
    for path in re.findall(r"(?:-f |build \S+ |launch )(containers/\S+)", PAGE + DOCKERFILE + APPTAINER):
        assert (ROOT / path).is_file(), path


def test_images_hold_what_git_holds() -> None:
    """Ignored files would make images large, and a .venv of the host would not run in them."""
    ignored = (ROOT / ".dockerignore").read_text().split()
    for line in (ROOT / ".gitignore").read_text().split():
        name = line.strip("/")
        if "*" not in name:
            assert name in ignored or f"**/{name}" in ignored, name
    assert ".git" in ignored
