"""The Kubernetes manifests: valid to the last key, and what has to agree between trainer and daemon does."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from checkpointd.bucket_urls import is_bucket_url, parse
from checkpointd.cli.program import commands
from checkpointd.config import credential_places
from tests.deploy.serve_arguments import serve_parameters

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
OPERATORS = ["podmonitor.yaml", "prometheusrule.yaml"]
"""Of the Prometheus operator, which Kubernetes does not know."""
FILES = sorted(path for path in FOLDER.glob("*.yaml") if path.name not in OPERATORS)
POD_FILES = [path.name for path in FILES if path.name not in ("networkpolicy.yaml", "job-s3-spool.yaml")]
SIDECAR_FILES = ["job.yaml", "jobset.yaml", "job-s3.yaml"]
DAEMON_SETS = ["daemonset.yaml", "daemonset-s3.yaml"]
JOBS = {"daemonset-job.yaml": "daemonset.yaml", "daemonset-s3-job.yaml": "daemonset-s3.yaml"}
"""The jobs that use the daemon of their node, and the DaemonSet that they use."""
BUCKET_FILES = {
    "job-s3.yaml": "job.yaml",
    "daemonset-s3.yaml": "daemonset.yaml",
    "daemonset-s3-job.yaml": "daemonset-job.yaml",
}
"""The manifests for a root in a bucket, each with the one for a file system that it is made like."""
UNITS = {"Gi": 1 << 30, "Mi": 1 << 20}
MIB = 1 << 20

Document = dict[str, Any]
yaml = pytest.importorskip("yaml", reason="needs PyYAML, which pre-commit brings in")


def load(name: str) -> Document:
    document: Document = yaml.safe_load((FOLDER / name).read_text())
    return document


def job_of(document: Document) -> Document:
    """The Job as Kubernetes' own kind: of a JobSet, the one that it is made of."""
    if document["kind"] != "JobSet":
        return document
    (replicated,) = document["spec"]["replicatedJobs"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train"}, "spec": replicated["template"]["spec"]}


def pod(name: str) -> Document:
    template: Document = job_of(load(name))["spec"]["template"]["spec"]
    return template


def daemon(name: str) -> Document:
    """The container that runs `checkpointd serve`."""
    spec = pod(name)
    (found,) = [c for c in spec.get("initContainers", []) + spec["containers"] if c.get("args", [""])[0] == "serve"]
    return dict(found)


def trainer(name: str) -> Document:
    (found,) = [c for c in pod(name)["containers"] if c["name"] == "trainer"]
    return dict(found)


def served(name: str) -> dict[str, Any]:
    """What `checkpointd serve` makes of the container's arguments; it ends the test where it does not take them."""
    return serve_parameters(daemon(name)["args"][1:])


def told(name: str, option: str) -> str:
    (found,) = [word.removeprefix(f"{option}=") for word in trainer(name)["command"] if word.startswith(f"{option}=")]
    return str(found)


def validate(document: Document, version: str = "1.34") -> None:
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="needs kubernetes-validate: make test-all installs it"
    )
    kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", ["1.29", "1.34"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_kubernetes_knows_every_key(path: Path, version: str) -> None:
    """The oldest that has native sidecars, and a new one. What a JobSet embeds is Kubernetes' own, and is checked."""
    validate(job_of(load(path.name)), version)


def test_a_key_that_kubernetes_does_not_know_is_seen() -> None:
    document = load("job.yaml")
    document["spec"]["template"]["spec"]["shareProcessNamespaces"] = True
    with pytest.raises(Exception, match="shareProcessNamespaces"):
        validate(document)


def test_the_jobset_is_one() -> None:
    """The outer part, by the fields of jobset.x-k8s.io/v1alpha2."""
    document = load("jobset.yaml")
    assert document["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert set(document["spec"]) == {"network", "failurePolicy", "replicatedJobs"}
    (replicated,) = document["spec"]["replicatedJobs"]
    assert set(replicated) == {"name", "replicas", "template"}
    job = replicated["template"]["spec"]
    nodes = int(told("jobset.yaml", "--nnodes"))
    assert job["completions"] == job["parallelism"] == nodes
    host = f"{document['metadata']['name']}-{replicated['name']}-0-0.{document['metadata']['name']}"
    assert told("jobset.yaml", "--rdzv-endpoint") == f"{host}:29500", "JobSet names pods so"


def test_job_and_jobset_have_the_same_pod() -> None:
    one, many = copy.deepcopy(pod("job.yaml")), copy.deepcopy(pod("jobset.yaml"))
    for spec in (one, many):
        command = spec["containers"][0]["command"]
        spec["containers"][0]["command"] = [word for word in command if not re.match(r"--(standalone|nnodes|rdzv)", word)]
    named = [spec["containers"][0]["env"].pop(0) for spec in (one, many)]
    assert one == many
    assert [entry["name"] for entry in named] == ["CHECKPOINTD_JOB"] * 2


@pytest.mark.parametrize("name", [*SIDECAR_FILES, *JOBS])
def test_a_restart_in_another_pod_is_known_to_be_the_same_job(name: str) -> None:
    """By what the controller labels each pod with, and keeps when it makes a new one."""
    [entry] = [entry for entry in trainer(name)["env"] if entry["name"] == "CHECKPOINTD_JOB"]
    uid = "jobset.sigs.k8s.io/jobset-uid" if name == "jobset.yaml" else "batch.kubernetes.io/controller-uid"
    assert entry["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.labels['{uid}']"


@pytest.mark.parametrize("name", SIDECAR_FILES)
def test_the_sidecar_is_a_native_one_in_the_trainers_process_namespace(name: str) -> None:
    spec = pod(name)
    assert [(c["name"], c["restartPolicy"]) for c in spec["initContainers"]] == [("checkpointd", "Always")]
    assert spec["shareProcessNamespace"] is True
    assert spec["restartPolicy"] == "OnFailure", "else a restart takes the daemon with it"


@pytest.mark.parametrize("name", DAEMON_SETS)
def test_the_daemonset_sees_every_process(name: str) -> None:
    assert pod(name)["hostPID"] is True


@pytest.mark.parametrize(("jobs", "daemons"), [*((name, name) for name in SIDECAR_FILES), *JOBS.items()])
def test_trainer_and_daemon_agree(jobs: str, daemons: str) -> None:
    assert told(jobs, "--sidecar") == served(daemons)["socket"]
    assert any(holds(root, told(jobs, "--root")) for root in served(daemons)["roots"])
    for field in ("runAsUser", "runAsGroup", "fsGroup", "runAsNonRoot"):
        assert pod(jobs)["securityContext"][field] == pod(daemons)["securityContext"][field]
    ours, theirs = mounts(daemons, daemon(daemons)), mounts(jobs, trainer(jobs))
    directories = [root for root in served(daemons)["roots"] if not is_bucket_url(root)]
    for path in (*directories, "/run/checkpointd"):
        assert ours[path] == theirs[path], "the same volume under the same path"


def holds(served: str, root: str) -> bool:
    """Whether `root` lies below `served`, and both name the same server."""
    if not is_bucket_url(served):
        return root.startswith(f"{served}/")
    above, below = parse(served), parse(root)
    return above.holds(below) and above.options == below.options


def mounts(name: str, container: Document) -> dict[str, Any]:
    """What is mounted where: the volume's source without how it is to be made."""
    sources = {v["name"]: {k: s for k, s in v.items() if k != "name"} for v in pod(name)["volumes"]}
    for source in sources.values():
        source.get("hostPath", {}).pop("type", None)
    return {mount["mountPath"]: sources[mount["name"]] for mount in container["volumeMounts"]}


@pytest.mark.parametrize("name", SIDECAR_FILES)
def test_there_is_time_to_finish(name: str) -> None:
    """The trainer's end comes first, and only then is the sidecar told."""
    environment = {entry["name"]: entry.get("value") for entry in trainer(name)["env"]}
    last_save_s = int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert pod(name)["terminationGracePeriodSeconds"] >= last_save_s + served(name)["grace_s"] + 15


@pytest.mark.parametrize("name", DAEMON_SETS)
def test_the_daemonset_has_time_to_finish(name: str) -> None:
    assert pod(name)["terminationGracePeriodSeconds"] >= served(name)["grace_s"] + 15


@pytest.mark.parametrize("name", [*SIDECAR_FILES, *DAEMON_SETS])
@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_probes_ask_the_socket(name: str, probe: str) -> None:
    """The kubelet is outside the pod and reaches no loopback address in it, so a probe is a command."""
    program, verb, option = daemon(name)[probe]["exec"]["command"]
    assert (program, option) == ("checkpointd", f"--socket={served(name)['socket']}")
    command = commands.get_command(commands.make_context("checkpointd", ["--help"], resilient_parsing=True), verb)
    assert command is not None
    assert "--socket" in [word for parameter in command.params for word in parameter.opts]


@pytest.mark.parametrize("name", [name for name in POD_FILES if name not in DAEMON_SETS])
def test_the_pod_is_guaranteed_its_memory(name: str) -> None:
    """Requests are limits in every container: the kernel then takes others first."""
    spec = pod(name)
    for container in spec.get("initContainers", []) + spec["containers"]:
        assert container["resources"]["requests"] == container["resources"]["limits"]


@pytest.mark.parametrize("name", SIDECAR_FILES)
def test_the_pod_has_room_for_what_is_held(name: str) -> None:
    limit = daemon(name)["resources"]["limits"]["memory"]
    assert int(limit[:-2]) * UNITS[limit[-2:]] > served(name)["held_mib"] * MIB


@pytest.mark.parametrize("name", POD_FILES)
def test_nothing_runs_with_more_rights_than_it_needs(name: str) -> None:
    spec = pod(name)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec.get("initContainers", []) + spec["containers"]:
        rights = container["securityContext"]
        assert rights["allowPrivilegeEscalation"] is False
        assert rights["capabilities"]["drop"] == ["ALL"]
        assert "add" not in rights["capabilities"]
        assert rights.get("runAsUser") is None
        assert not container["image"].endswith(":latest")
        assert ":" in container["image"]


def test_the_network_policy_opens_the_status_port() -> None:
    policy = load("networkpolicy.yaml")["spec"]
    (port,) = [entry["port"] for rule in policy["ingress"] for entry in rule.get("ports", [])]
    for name in (*SIDECAR_FILES, *DAEMON_SETS):
        assert served(name)["http"] == f"0.0.0.0:{port}"
        assert daemon(name)["ports"] == [{"name": "metrics", "containerPort": port}]
        labels = job_of(load(name))["spec"]["template"]["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()


# --- many users, and starting ---------------------------------------------------------------------------------------


def amount(text: str) -> float:
    """Cores or bytes."""
    if text.endswith("m"):
        return int(text[:-1]) / 1000
    return float(int(text[:-2]) * UNITS[text[-2:]]) if text[-2:] in UNITS else float(text)


def test_a_daemonset_for_each_of_fifty_users_leaves_the_node_to_training() -> None:
    asked = daemon("daemonset.yaml")["resources"]["requests"]
    training = trainer("daemonset-job.yaml")["resources"]["requests"]
    assert 50 * amount(asked["cpu"]) <= amount(training["cpu"]) / 4
    assert 50 * amount(asked["memory"]) <= amount(training["memory"]) / 4


@pytest.mark.parametrize("name", DAEMON_SETS)
def test_one_number_stands_for_the_user(name: str) -> None:
    """As its first lines say: replaced, the DaemonSet of another user has nothing in common with this one's."""
    one = load(name)
    other = yaml.safe_load((FOLDER / name).read_text().replace("1000", "1042"))
    assert one["metadata"]["name"] != other["metadata"]["name"]
    assert one["spec"]["selector"] != other["spec"]["selector"]
    for made in (one, other):
        labels = made["spec"]["template"]["metadata"]["labels"]
        assert made["spec"]["selector"]["matchLabels"].items() <= labels.items()
    spec = other["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsUser"] == 1042
    assert "--socket=/run/checkpointd/user-1042/checkpointd.sock" in spec["containers"][0]["args"]
    assert "1000" not in str(spec["volumes"])
    validate(other)


@pytest.mark.parametrize("name", DAEMON_SETS)
def test_the_directories_on_the_node_are_made_by_the_node(name: str) -> None:
    """No container of the DaemonSet is root, so lines for systemd-tmpfiles make them, for the daemon's user alone."""
    assert "initContainers" not in pod(name)
    text = (FOLDER.parent / "systemd" / "checkpointd.tmpfiles.conf").read_text()
    lines = [line.lstrip("#").split() for line in text.splitlines()]
    user = str(pod(name)["securityContext"]["runAsUser"])
    for path in filter(None, (str(Path(served(name)["socket"]).parent), served(name)["spool"])):
        assert ["d", path, "0700", user, user, "-"] in lines
    assert {volume["hostPath"]["type"] for volume in pod(name)["volumes"] if "hostPath" in volume} == {"Directory"}


# --- roots in buckets -----------------------------------------------------------------------------------------------

SPOOLS = ["job-s3.yaml", "daemonset-s3.yaml"]
TOKEN = {"serviceAccountToken": {"path": "token", "audience": "sts.amazonaws.com", "expirationSeconds": 3600}}
OF_ROOTS = re.compile(r"--(root|spool)\b")


def containers(spec: Document) -> list[Document]:
    return list(spec.get("initContainers", [])) + list(spec["containers"])


def without_roots(name: str) -> Document:
    """The manifest without what says where roots and spools are, and how they are reached."""
    document = load(name)
    spec = document["spec"]["template"]["spec"]
    spec.pop("serviceAccountName", None)
    places = {"checkpoints", "spool", "bucket-token"}
    spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] not in places]
    for container in containers(spec):
        container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] not in places]
        container["env"] = [entry for entry in container.get("env", []) if not entry["name"].startswith("AWS_")]
        for words in ("args", "command"):
            container[words] = [word for word in container.get(words, []) if not OF_ROOTS.match(word)]
    return document


@pytest.mark.parametrize(("bucket", "files"), BUCKET_FILES.items())
def test_nothing_else_differs_from_the_manifest_for_a_file_system(bucket: str, files: str) -> None:
    assert without_roots(bucket) == without_roots(files)
    assert load(bucket) != load(files)


@pytest.mark.parametrize("name", BUCKET_FILES)
def test_every_container_has_the_pods_own_identity(name: str) -> None:
    """By a token alone: no manifest holds a key, and nothing of Kubernetes' own API is mounted."""
    spec = pod(name)
    assert spec["serviceAccountName"] == "checkpoints"
    (volume,) = [volume for volume in spec["volumes"] if volume["name"] == "bucket-token"]
    assert volume["projected"]["sources"] == [TOKEN]
    for container in containers(spec):
        given = {entry["name"]: entry.get("value", "") for entry in container["env"] if entry["name"].startswith("AWS_")}
        assert set(given) == {"AWS_ROLE_ARN", "AWS_REGION", "AWS_WEB_IDENTITY_TOKEN_FILE"}
        (mounted,) = [mount for mount in container["volumeMounts"] if mount["name"] == "bucket-token"]
        assert mounted["readOnly"] is True
        assert given["AWS_WEB_IDENTITY_TOKEN_FILE"] == f"{mounted['mountPath']}/token"


@pytest.mark.parametrize("name", SPOOLS)
def test_a_token_that_was_renewed_can_still_be_read(name: str) -> None:
    """The kubelet puts a new file in its place, and a rule for a file is for the old one. So the directory must be allowed."""
    (token,) = [entry["value"] for entry in daemon(name)["env"] if entry["name"] == "AWS_WEB_IDENTITY_TOKEN_FILE"]
    assert any(Path(token).is_relative_to(place) for place in credential_places())


@pytest.mark.parametrize("name", SPOOLS)
def test_the_spool_outlives_the_pod(name: str) -> None:
    spool = served(name)["spool"]
    source = mounts(name, daemon(name))[spool]
    if name == "job-s3.yaml":
        claim = load("job-s3-spool.yaml")
        assert source == {"persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
        assert claim["spec"]["accessModes"] == ["ReadWriteOncePod"], "two daemons cannot share a spool"
        assert served(name)["spool_finish"] is True, "after the job nobody goes on with the uploads"
    else:
        assert source == {"hostPath": {"path": spool}}
    trained = [job for job, served_by in {**JOBS, "job-s3.yaml": "job-s3.yaml"}.items() if served_by == name]
    assert all(spool not in mounts(job, trainer(job)) for job in trained), "the daemon's alone"


@pytest.mark.parametrize("name", [*SIDECAR_FILES, *DAEMON_SETS])
def test_a_daemon_has_as_long_to_start_as_under_systemd(name: str) -> None:
    unit = (FOLDER.parent / "systemd" / "checkpointd@.service").read_text()
    [seconds] = re.findall(r"(?m)^TimeoutStartSec=(\d+)$", unit)
    probe = daemon(name)["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= int(seconds)


# --- the Prometheus operator ----------------------------------------------------------------------------------------


def test_the_rule_is_the_alerts() -> None:
    rule = load("prometheusrule.yaml")
    assert (rule["apiVersion"], rule["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    alerts = yaml.safe_load((FOLDER.parent / "prometheus" / "alerts.yml").read_text())
    assert rule["spec"] == alerts, "run `make generate`"


def test_the_monitor_finds_every_daemon_and_calls_it_as_prometheus_does() -> None:
    monitor = load("podmonitor.yaml")
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
    spec = monitor["spec"]
    assert set(spec) == {"namespaceSelector", "selector", "podMetricsEndpoints"}
    [endpoint] = spec["podMetricsEndpoints"]
    for name in (*SIDECAR_FILES, *DAEMON_SETS):
        labels = job_of(load(name))["spec"]["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        assert endpoint["port"] in [port["name"] for port in daemon(name)["ports"]]
    prometheus = yaml.safe_load((FOLDER.parent / "prometheus" / "prometheus.yml").read_text())
    jobs = {config["job_name"]: config for config in prometheus["scrape_configs"]}
    assert {"targetLabel": "job", "replacement": "checkpointd-pods"} in endpoint["relabelings"]
    dropped = [rule["regex"] for rule in jobs["checkpointd-pods"]["relabel_configs"] if rule.get("action") == "drop"]
    assert dropped == [rule["regex"] for rule in endpoint["relabelings"] if rule.get("action") == "drop"]
