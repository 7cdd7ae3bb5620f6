"""The manifests in examples/kubernetes: the schemas of their kinds, where no field is unknown, and rules of our own."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow.training import models as training_operator
from kubeflow_trainer_api import models as trainer

from fastckpt._core.config import Settings
from fastckpt.errors import ConfigError
from fastckpt_run.options import parse
from fastckpt_run.rendezvous.signing import secret_of

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples/kubernetes").glob("*.yaml"))
KUBERNETES = ("1.35", "1.37")
OF_TRAINER = {
    "JobSet": trainer.JobsetV1alpha2JobSet,
    "TrainingRuntime": trainer.TrainerV1alpha1TrainingRuntime,
    "TrainJob": trainer.TrainerV1alpha1TrainJob,
}
"""Kinds whose classes are made from the schemas of Kubeflow Trainer, which has those of JobSet."""
Manifest = dict[str, Any]


ALL = {f"{path.stem}-{each['kind']}": each for path in FILES for each in yaml.safe_load_all(path.read_text())}


class Refused(Exception):
    """A manifest that does not fit its schema."""


def validate(manifest: Manifest) -> None:
    """Raise Refused for what the schema of its kind does not know, or what has another type."""
    kind = manifest["kind"]
    if kind in OF_TRAINER:
        try:
            known = OF_TRAINER[kind].from_dict(manifest)
        except ValueError as error:
            raise Refused(str(error)) from error
        if known.to_dict() != manifest:  # the classes leave out what they do not know
            raise Refused(f"{kind} has a field that its schema does not know")
    elif kind == "PyTorchJob":
        _fits(manifest, "KubeflowOrgV1PyTorchJob", kind)
    for part in [manifest] if manifest["apiVersion"] in ("v1", "batch/v1") else core_parts(manifest):
        for version in KUBERNETES:
            try:
                kubernetes_validate.validate(part, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                raise Refused(f"{list(error.path)}: {error.message}") from error


def _fits(value: Any, kind: str, where: str) -> None:
    """The same of the classes of the Training Operator, down to the pods, which are Kubernetes's."""
    if found := re.fullmatch(r"dict\(str, (\w+)\)", kind):
        for name, each in value.items():
            _fits(each, found[1], f"{where}.{name}")
        return
    model = getattr(training_operator, kind, None)
    if model is None or not hasattr(model, "attribute_map"):
        primitive = {"int": int, "str": str, "bool": bool}.get(kind)
        if primitive and type(value) is not primitive:
            raise Refused(f"{where} is no {kind}")
        return
    types = {name: model.openapi_types[attribute] for attribute, name in model.attribute_map.items()}
    for name, each in value.items():
        if name not in types:
            raise Refused(f"{where} has no field {name}")
        _fits(each, types[name], f"{where}.{name}")


def core_parts(manifest: Manifest) -> list[Manifest]:
    """The jobs or pods within a manifest of another kind, each as a manifest of its own."""
    spec = manifest["spec"]
    if manifest["kind"] == "PyTorchJob":
        return [
            {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": each["template"]}
            for name, each in spec["pytorchReplicaSpecs"].items()
        ]
    set_of_jobs = spec["template"]["spec"] if manifest["kind"] == "TrainingRuntime" else spec
    return [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": each["name"]}, "spec": each["template"]["spec"]}
        for each in set_of_jobs.get("replicatedJobs", [])
    ]


PODS = [
    (name, pod)
    for name, manifest in ALL.items()
    if manifest["kind"] in ("Job", "JobSet", "TrainingRuntime", "PyTorchJob")
    for part in ([manifest] if manifest["kind"] == "Job" else core_parts(manifest))
    for pod in [part["template"]["spec"] if part["kind"] == "PodTemplate" else part["spec"]["template"]["spec"]]
]


@pytest.mark.parametrize("name", ALL)
def test_a_manifest_fits_the_schemas(name: str) -> None:
    validate(ALL[name])
    with pytest.raises(Refused):
        validate(ALL[name] | {"mispelt": "x"})


def size(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([MG]i)", text).groups()
    return int(number) << {"Mi": 20, "Gi": 30}[unit]


def test_the_pages_show_parts_of_the_manifests() -> None:
    for page in ("kubernetes.md", "docker.md"):
        text = (ROOT / "docs/clusters" / page).read_text()
        for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            first, _, shown = block.partition("\n")
            assert first.startswith("# examples/"), first
            assert f"\n{shown}" in (ROOT / first.removeprefix("# ")).read_text(), first


@pytest.mark.parametrize("name,pod", PODS, ids=[name for name, _ in PODS])
def test_a_pod_has_memory_and_time_for_its_checkpoints(name: str, pod: Manifest) -> None:
    [container] = pod["containers"]
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    memory = volumes[mounts["/dev/shm"]]["emptyDir"]
    assert memory["medium"] == "Memory" and set(mounts.values()) == set(volumes)
    per_node = ALL["trainjob-TrainJob"]["spec"]["trainer"]["resourcesPerNode"]
    limit = container.get("resources", per_node)["limits"]["memory"]
    assert size(limit) > size(memory["sizeLimit"]), "pages of a tmpfs count as the memory of the container"
    environment = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    settings = Settings.from_environment(environment)
    assert pod["terminationGracePeriodSeconds"] >= settings.flush_timeout + 60
    assert settings.exit_codes and container["securityContext"]["readOnlyRootFilesystem"]
    assert {environment["TMPDIR"], environment["HOME"]} <= set(mounts)


def test_commands_are_understood_and_name_no_host_but_by_the_name_of_the_job() -> None:
    found = [pod["containers"][0]["command"] for _, pod in PODS if "command" in pod["containers"][0]]
    found.append(ALL["trainjob-TrainJob"]["spec"]["trainer"]["command"])
    assert len(found) == 6
    for command in found:
        assert command[0] == "fastckpt-run"
        _, arguments = parse(command[1:])
        assert arguments.training_script == "train.py"
        endpoints = arguments.rdzv_endpoint.split(",") if arguments.rdzv_endpoint else []
        assert all(re.fullmatch(r"\$\((JOB|SET)\)-[a-z0-9-]+(\.\$\(\1\))?", each) for each in endpoints)
        assert arguments.standalone or (len(endpoints) == 2 and "--fast-secret-file=/etc/fastckpt/secret" in command)


def test_a_secret_as_kubelet_mounts_it_for_a_group_is_accepted_and_no_other_that_a_group_may_read(
    tmp_path: Path,
) -> None:
    if os.getuid():
        pytest.skip("only root can change the owner of a file")
    folder = Path("/tmp") / f"{os.environ['TEST_MARK']}-secret"  # where another user finds it
    folder.mkdir(mode=0o755)
    try:
        secret = folder / "secret"
        secret.write_text("0123456789abcdef")
        outcomes = {}
        for owner, mode in [(0, 0o440), (0, 0o444), (0, 0o460), (1000, 0o440), (1000, 0o400), (77, 0o440)]:
            os.chown(secret, owner, 1000)
            secret.chmod(mode)
            outcomes[owner, mode] = _read_as_user(1000, secret)
        accepted = {each for each, is_accepted in outcomes.items() if is_accepted}
        assert accepted == {(0, 0o440), (1000, 0o400)}
    finally:
        shutil.rmtree(folder)


def _read_as_user(user: int, secret: Path) -> bool:
    child = os.fork()
    if not child:
        try:
            os.setgroups([user])
            os.setgid(user)
            os.setuid(user)
            secret_of(Settings(secret_file=str(secret)))
            os._exit(0)
        except ConfigError:
            os._exit(1)
        finally:
            os._exit(2)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1)
    return code == 0
