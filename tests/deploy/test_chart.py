"""The Helm chart: rendered with several sets of values, held against Kubernetes' schemas and expertd's own parser."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from chart_kit import CHART, NEEDED, ROOT, helm, objects
from command_kit import read

from expertd_client.transports.credentials import Credentials
from expertd_server.config.values import Shard

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = NEEDED
EXAMPLES = {p.stem: p for p in sorted((ROOT / "deploy" / "helm" / "examples").glob("*.yaml"))}
KUBERNETES = ("1.28", "1.37")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def values(name: str) -> dict:
    import yaml

    return {} if name == "default" else yaml.safe_load(EXAMPLES[name].read_text())


@pytest.fixture(scope="module", params=["default", *EXAMPLES])
def rendered(request):
    return objects(values(request.param))


def sets(rendered):
    return {name: o for (kind, name), o in rendered.items() if kind == "StatefulSet"}


def container(stateful_set):
    (only,) = stateful_set["spec"]["template"]["spec"]["containers"]
    return only


def test_there_are_three_sets_of_values():
    assert {"mixed-pools", "small"} <= EXAMPLES.keys()


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_is_one_that_kubernetes_takes(rendered, version):
    import kubernetes_validate

    for (kind, _), o in rendered.items():
        if kind != "ServiceMonitor":  # a custom resource: its shape is held below
            kubernetes_validate.validate(o, version, strict=True)


def test_helm_finds_nothing_to_say():
    answer = helm({})
    assert answer["lint"]["errors"] == []
    assert [m["error"] for m in answer["lint"]["messages"]] == ["icon is recommended"]


def expertd_of(stateful_set, rendered, pod, tmp_path, monkeypatch):
    """The configuration that a pod's server has: its command, read by the parser with its file and environment."""
    c = container(stateful_set)
    env = {e["name"]: e.get("value", pod) for e in c["env"]}
    (volume,) = (v for v in stateful_set["spec"]["template"]["spec"]["volumes"] if v["name"] == "config")
    config = rendered["ConfigMap", volume["configMap"]["name"]]["data"]["expertd.toml"]
    file = tmp_path / "expertd.toml"
    file.write_text(config)
    assert tomllib.loads(config)
    words = [w.replace("/etc/expertd/expertd.toml", str(file)) for w in (*c["command"], *c["args"])]
    return read(words, monkeypatch, {k: v for k, v in env.items() if k.startswith("EXPERTD_")})


def test_the_pods_hold_every_part(rendered, tmp_path, monkeypatch):
    held, of = [], set()
    for name, s in sets(rendered).items():
        # With autoscaling the number of pods is the autoscaler's.
        n = s["spec"].get("replicas") or rendered["HorizontalPodAutoscaler", name]["spec"]["minReplicas"]
        for i in range(n):
            config = expertd_of(s, rendered, f"{name}-{i}", tmp_path, monkeypatch)
            assert config.listen.port == container(s)["ports"][0]["containerPort"]
            assert config.metrics_listen.port == container(s)["ports"][1]["containerPort"]
            held.append(config.shard.rank)
            of.add(config.shard.count)
    (count,) = of
    assert set(held) == set(range(count))
    assert len({held.count(r) for r in range(count)}) == 1, "each part has as many copies as the others"


def test_every_copy_of_a_set_holds_its_shard(tmp_path, monkeypatch):
    low = {"kind": "cpu", "shards": {"first": 0, "count": 2, "of": 5}, "copies": 2}
    rest = {"kind": "cpu", "shards": {"first": 2, "count": 3, "of": 5}, "copies": 3}
    rendered = objects({"groups": {"cpu": None, "a": low, "b": rest}})
    got = {
        name: (s["spec"]["replicas"], expertd_of(s, rendered, f"{name}-1", tmp_path, monkeypatch).shard)
        for name, s in sets(rendered).items()
    }
    a = {f"demo-expertd-a-s{r}": (2, Shard(r, 5)) for r in (0, 1)}
    assert got == {**a, **{f"demo-expertd-b-s{r}": (3, Shard(r, 5)) for r in (2, 3, 4)}}


def apart(stateful_set) -> dict:
    return stateful_set["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"]


def test_copies_of_a_shard_get_different_nodes(rendered):
    """A required rule whose labels are those of the shard's own pods, and of no other shard's."""
    labels = {name: s["spec"]["template"]["metadata"]["labels"] for name, s in sets(rendered).items()}
    shards = {
        name: next(e["value"] for e in container(s)["env"] if e["name"] == "EXPERTD_SHARD")
        for name, s in sets(rendered).items()
    }
    for name, s in sets(rendered).items():
        (term,) = apart(s)["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        found = {n for n, own in labels.items() if term["labelSelector"]["matchLabels"].items() <= own.items()}
        assert found == {n for n, shard in shards.items() if shard == shards[name]}


def test_spreading_copies_can_be_a_preference_or_off_and_keeps_an_affinity():
    own = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "a"}]}}
    node = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}

    def affinity(**group):
        (first, *_) = sets(objects({"groups": {"cpu": group}})).values()
        return first["spec"]["template"]["spec"].get("affinity")

    (term,) = affinity(copySpread="preferred", copySpreadKey="zone")["podAntiAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    assert term["podAffinityTerm"]["topologyKey"] == "zone"
    assert affinity(copySpread="off") is None
    assert affinity(copySpread="off", affinity=own) == own
    both = affinity(affinity={**own, **node})
    assert both["nodeAffinity"] == node["nodeAffinity"]
    keys = [t["topologyKey"] for t in both["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]]
    assert keys == ["a", "kubernetes.io/hostname"]


def test_numbers_and_texts_reach_the_server_as_they_are(tmp_path, monkeypatch):
    serve = {"max-queue-tokens": 1000000, "patience": 0.125, "max-tokens": 2048, "backend": "layers.0-2=cpu,*=auto"}
    rendered = objects({"serve": {**serve, "grace-s": 61.5}})
    s, *_ = sets(rendered).values()
    config = expertd_of(s, rendered, "x-1", tmp_path, monkeypatch)
    assert (config.max_queue_tokens, config.patience, config.max_tokens) == (1000000, 0.125, 2048)
    assert (config.backend, config.grace_s) == (serve["backend"], 61.5)
    # preStop, then the grace time, then a margin: Kubernetes must not kill what is still answering.
    assert s["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= 5 + 61.5


def test_a_pod_is_asked_for_its_health_where_it_listens(rendered, monkeypatch):
    for s in sets(rendered).values():
        c = container(s)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            port = c["ports"][0]["containerPort"]
            if "EXPERTD_TLS_CERT" not in {e["name"] for e in c["env"]}:
                assert c[probe]["grpc"] == {"port": port}
                continue
            words = c[probe]["exec"]["command"]
            assert words[:3] == ["expertctl", "health", f"127.0.0.1:{port}"]
            read(words, monkeypatch)
        # A server that still loads is not a dead one.
        startup = c["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800


def test_nobody_is_root_and_nothing_is_written_but_caches(rendered):
    for s in sets(rendered).values():
        pod, c = s["spec"]["template"]["spec"], container(s)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        assert c["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        volumes = {v["name"] for v in pod["volumes"]} | {
            v["metadata"]["name"] for v in s["spec"].get("volumeClaimTemplates", [])
        }
        assert {m["name"] for m in c["volumeMounts"]} == volumes
        writable = {m["mountPath"] for m in c["volumeMounts"] if not m.get("readOnly")}
        assert writable == {"/cache", "/tmp"}


def test_selectors_find_the_pods(rendered):
    for s in sets(rendered).values():
        labels = s["spec"]["template"]["metadata"]["labels"].items()
        (service,) = (o for (kind, _), o in rendered.items() if kind == "Service")
        assert service["spec"]["clusterIP"] == "None"
        assert s["spec"]["serviceName"] == service["metadata"]["name"]
        named = {p["name"] for p in container(s)["ports"]}
        assert {p["targetPort"] for p in service["spec"]["ports"]} <= named
        wanted = [service["spec"]["selector"], s["spec"]["selector"]["matchLabels"]]
        wanted += [
            o["spec"]["podSelector"]["matchLabels"] for (kind, _), o in rendered.items() if kind == "NetworkPolicy"
        ]
        assert all(w.items() <= labels for w in wanted)


def test_each_shard_has_one_budget_for_all_of_its_copies(rendered):
    """Kubernetes evicts no pod that two budgets select, and two of one shard would each let a copy go."""
    budgets = [
        o["spec"]["selector"]["matchLabels"] for (kind, _), o in rendered.items() if kind == "PodDisruptionBudget"
    ]
    labels = [s["spec"]["template"]["metadata"]["labels"] for s in sets(rendered).values()]
    if budgets:
        assert [sum(b.items() <= of.items() for b in budgets) for of in labels] == [1] * len(labels)
    assert len(budgets) in (0, len({of["expertd/shard"] for of in labels}))


def test_copies_of_a_shard_in_two_groups_share_its_budget():
    groups = {"cpu": None, "a": group(0, 2, 2, copies=2), "b": group(0, 2, 2)}
    test_each_shard_has_one_budget_for_all_of_its_copies(objects({"groups": groups}))


def test_the_mixed_example_has_its_devices_and_scales():
    rendered = objects(values("mixed-pools"))
    limits = {name: container(s)["resources"]["limits"] for name, s in sets(rendered).items()}
    assert [name for name in limits if "nvidia" in name] == [f"demo-expertd-nvidia-s{r}" for r in range(6)]
    assert limits["demo-expertd-nvidia-s5"]["nvidia.com/gpu"] == 1
    assert limits["demo-expertd-intel-s6"] == {"gpu.intel.com/xe": 1}
    assert limits["demo-expertd-cpu-s7"] == {"memory": "32Gi"}
    images = {container(s)["image"].rpartition(":")[2] for s in sets(rendered).values()}
    assert images == {f"{VERSION}-{kind}" for kind in ("cpu", "cuda", "xpu")}
    scalers = {name: o["spec"] for (kind, name), o in rendered.items() if kind == "HorizontalPodAutoscaler"}
    assert list(scalers) == [name for name in limits if "nvidia" in name]
    for name, scaler in scalers.items():
        assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 4)
        assert scaler["scaleTargetRef"]["name"] == name
        assert "replicas" not in sets(rendered)[name]["spec"]
    monitor = rendered["ServiceMonitor", "demo-expertd"]["spec"]
    service = rendered["Service", "demo-expertd"]
    assert monitor["endpoints"][0]["port"] in {p["name"] for p in service["spec"]["ports"]}
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    policy = rendered["NetworkPolicy", "demo-expertd"]["spec"]
    assert policy["egress"] == []
    assert [list(peer) for rule in policy["ingress"] for peer in rule["from"]] == [["namespaceSelector"]] * 2


def test_a_pod_of_a_group_of_gpus_serves_on_no_other_device(tmp_path, monkeypatch):
    """With `auto` it would serve on the CPU where no GPU is visible."""

    def device(everywhere=None, **own):
        rendered = objects({"serve": everywhere or {}, "groups": {"cpu": None, "a": {**group(0, 1, 1), **own}}})
        (s,) = sets(rendered).values()
        return expertd_of(s, rendered, "x-0", tmp_path, monkeypatch).device

    assert [device(kind=kind) for kind in ("cpu", "cuda", "rocm", "xpu")] == ["auto", "cuda", "rocm", "xpu"]
    assert device(kind="cuda", serve={"device": "cuda:1"}) == "cuda:1"
    assert device({"device": "cuda:0,cpu"}, kind="cuda") == "cuda:0,cpu"


def test_a_group_has_a_runtime_class_where_it_names_one():
    groups = {"cpu": None, "a": group(0, 1, 2), "b": group(1, 1, 2, runtimeClassName="nvidia")}
    pods = {name: s["spec"]["template"]["spec"] for name, s in sets(objects({"groups": groups})).items()}
    assert {name: pod.get("runtimeClassName") for name, pod in pods.items()} == {
        "demo-expertd-a-s0": None,
        "demo-expertd-b-s1": "nvidia",
    }


def test_files_of_secrets_are_where_the_server_looks(tmp_path, monkeypatch):
    rendered = objects(values("tls"))
    s, *_ = sets(rendered).values()
    config = expertd_of(s, rendered, "x-0", tmp_path, monkeypatch)
    mounts = {m["name"]: m["mountPath"] for m in container(s)["volumeMounts"]}
    secrets = {v["name"]: v["secret"]["secretName"] for v in s["spec"]["template"]["spec"]["volumes"] if "secret" in v}
    assert secrets == {"tls": "experts-tls", "callers": "experts-callers"}
    files = (config.tls_cert, config.tls_key, config.tls_client_ca)
    assert [str(f) for f in files] == [f"{mounts['tls']}/{name}" for name in ("tls.crt", "tls.key", "ca.crt")]
    assert str(config.callers) == f"{mounts['callers']}/callers.toml"


def ports_for(policy, peer) -> set[str]:
    """Names of the ports that the pods of a NetworkPolicyPeer reach."""
    rules = [rule for rule in policy["spec"]["ingress"] if peer in rule.get("from", [peer])]
    return {p["port"] for rule in rules for p in rule["ports"]}


def test_what_is_held_is_changed_by_its_own_callers_on_its_own_port(tmp_path, monkeypatch):
    wanted = values("moving")
    rendered = objects(wanted)
    _, s, _ = sets(rendered).values()
    config = expertd_of(s, rendered, "x-0", tmp_path, monkeypatch)
    ports = {p["name"]: p["containerPort"] for p in container(s)["ports"]}
    assert (config.admin_listen.port, config.tcp_where.port) == (ports["admin"], ports["tcp"])
    assert len(set(ports.values())) == len(ports) == 4
    assert config.shard == Shard(1, 3)
    assert config.expert_metrics, "the job plans by the routes that each expert got"
    kept = {m["mountPath"] for m in container(s)["volumeMounts"] if m["name"] == "cache"}
    assert {str(config.held.parent)} == kept
    assert [v["metadata"]["name"] for v in s["spec"]["volumeClaimTemplates"]] == ["cache"]
    policy = rendered["NetworkPolicy", "demo-expertd"]
    (client, tester), (admin,) = wanted["networkPolicy"]["clients"], wanted["networkPolicy"]["admins"]
    (test,) = (o for (kind, _), o in rendered.items() if kind == "Pod")
    assert tester["podSelector"]["matchLabels"].items() <= test["metadata"]["labels"].items(), "`helm test` can pass"
    assert ports_for(policy, client) == ports_for(policy, tester) == {"grpc", "tcp", "metrics"}
    assert ports_for(policy, admin) == {"grpc", "admin", "metrics"}
    assert ports_for(policy, {"podSelector": {}}) == {"metrics"}
    wanted["networkPolicy"]["scrapers"] = [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]
    policy = objects(wanted)["NetworkPolicy", "demo-expertd"]
    assert ports_for(policy, admin) == {"grpc", "admin", "metrics"}, "`expertctl plan` reads metrics"


def test_without_a_network_policy_nobody_has_to_be_named_in_it():
    """Who may reach AdminService is then said elsewhere; its callers still need TLS and the right admin."""
    wanted = values("moving")
    wanted["networkPolicy"] = {"enabled": False}
    assert not [kind for kind, _ in objects(wanted) if kind == "NetworkPolicy"]
    wanted["networkPolicy"] = {"enabled": True}
    assert "networkPolicy.admins: got nobody" in helm(wanted)["error"]


def test_nothing_of_it_is_there_unless_asked_for(tmp_path, monkeypatch):
    rendered = objects({})
    s, *_ = sets(rendered).values()
    config = expertd_of(s, rendered, "x-0", tmp_path, monkeypatch)
    assert (config.admin_listen, config.held, config.tcp_where) == (None, None, None)
    assert ports_for(rendered["NetworkPolicy", "demo-expertd"], {"podSelector": {}}) == {"grpc", "metrics"}
    assert not [kind for kind, _ in rendered if kind.startswith("Role")]


def test_clients_that_follow_endpointslices_may_and_may_nothing_else():
    rendered = objects(values("moving"))
    (role,) = (o for (kind, _), o in rendered.items() if kind == "Role")
    (binding,) = (o for (kind, _), o in rendered.items() if kind == "RoleBinding")
    assert role["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    ]
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == ("Role", role["metadata"]["name"])
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "frontend", "namespace": "web"}]
    (service,) = (o for (kind, _), o in rendered.items() if kind == "Service")
    assert "grpc" in {p["name"] for p in service["spec"]["ports"]}, "the port that EndpointSlices(port=) names"


INVENTORY = "--servers=/inventory/servers.json"


@pytest.mark.parametrize(
    ("name", "commands", "more", "wanted"),
    [
        ("apply", [("plan", True), ("apply", False)], {}, ["--copies 2"]),  # or the last replica but one may go
        ("apply", [("plan", True), ("apply", False)], {"COPIES": "3"}, ["--copies 3"]),
        ("apply", [("plan", True), ("apply", False)], {"INVENTORY": INVENTORY}, [INVENTORY]),
        ("update", [("update", True), ("versions", True)], {}, []),
        ("update", [("update", True), ("versions", True)], {"MORE": "--version 7"}, ["--version 7"]),
    ],
)
def test_the_jobs_of_admins(name, commands, more, wanted, monkeypatch, tmp_path):
    """Their scripts, run by a shell with a program `expertctl` that says what it was given, read by the parser."""
    import kubernetes_validate
    import yaml

    job = yaml.safe_load((ROOT / f"deploy/kubernetes/{name}.yaml").read_text())
    for version in KUBERNETES:
        kubernetes_validate.validate(job, version, strict=True)
    rendered = objects(values("moving"))
    pod = job["spec"]["template"]
    (c,) = pod["spec"]["containers"]
    (admin,) = values("moving")["networkPolicy"]["admins"]
    assert admin["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    pods = [f"{name}-{copy}" for name, s in sets(rendered).items() for copy in range(s["spec"]["replicas"])]
    assert len(pods) == 6
    fake = tmp_path / "expertctl"
    fake.write_text('#!/bin/sh\necho expertctl "$@"\n')
    fake.chmod(0o755)
    for dry in ("--dry-run", ""):
        env = {e["name"]: e["value"] for e in c["env"]} | more
        assert env.keys() == {e["name"] for e in c["env"]}, "variables that the file has"
        env |= {"DRY_RUN": dry, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        told = subprocess.run(
            [*c["command"], *c["args"]], env=env, capture_output=True, text=True, check=True, timeout=10
        )
        given = [line.split() for line in told.stdout.splitlines()]
        addresses = [f"{pod.replace('demo-', 'experts-')}.experts-expertd.inference.svc:50051" for pod in pods]
        for words, (command, all_pods) in zip(given, commands, strict=True):
            assert words[1] == command
            assert [w for w in words if ":50051" in w] == (addresses if all_pods else [])
            assert {"--ca=/tls/ca.crt", "--token-file=/admin/token"} <= set(words)
            read(words, monkeypatch)
        assert ("--dry-run" in told.stdout) == bool(dry)
        for words in wanted:
            assert f" {words}" in told.stdout.splitlines()[0]
    mounted = {m["mountPath"] for m in c["volumeMounts"]}
    assert {"/tls", "/admin", "/tmp"} == mounted - {"/inventory"}
    assert ("/inventory" in mounted) == (name == "apply")


def test_what_the_jobs_ask_of_values_is_taken_by_the_chart():
    """`{...}` of their comments, as YAML."""
    import yaml

    named = [
        yaml.safe_load(f"{{{found}}}")
        for path in sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
        for found in re.findall(r"`(serve: {.*})`", path.read_text())
    ]
    assert named == [{"serve": {"expert-metrics": "yes"}}]
    for values in named:
        assert "error" not in helm(values)


def test_the_way_back_of_an_update_is_a_line_of_its_job(monkeypatch):
    """The page and the job's comment name the same line, which takes the place of one that is there."""
    import yaml

    text = (ROOT / "deploy/kubernetes/update.yaml").read_text()
    (c,) = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"]
    page = " ".join((ROOT / "docs/deploy.md").read_text().split())
    found = re.search(r"in `args` of update.yaml replace the line `(.*?)\.\.\.` by `(.*?)`", page)
    assert found is not None
    assert f"`{found[2]}` in args instead of `{found[1]}...`" in text
    assert sum(line.startswith(found[1]) for line in c["args"][0].splitlines()) == 1
    env = {e["name"]: e["value"] for e in c["env"]}
    words = [w for word in found[2].split() for w in (env[word[1:]].split() if word[0] == "$" else [word])]
    assert {"--rollback", "--token-file=/admin/token"} < set(words)
    read(words, monkeypatch)


def test_the_volume_of_checkpoints_is_what_the_example_mounts():
    import kubernetes_validate
    import yaml

    claim, pod = yaml.safe_load_all((ROOT / "deploy/kubernetes/models.yaml").read_text())
    for version in KUBERNETES:
        for o in (claim, pod):
            kubernetes_validate.validate(o, version, strict=True)
    (volume,) = pod["spec"]["volumes"]
    named = values("mixed-pools")["models"]["volume"]["persistentVolumeClaim"]["claimName"]
    assert claim["metadata"]["name"] == volume["persistentVolumeClaim"]["claimName"] == named


NOTES_TLS = {"tls": {"secretName": "a", "serverName": "b", "clientCertificates": True}}


@pytest.mark.parametrize(
    ("more", "python", "command"),
    [
        ({}, None, "expertctl describe 127.0.0.1:50051"),
        (
            NOTES_TLS,
            {"ca", "server_name", "certificate", "key"},
            "expertctl describe 127.0.0.1:50051 --ca=/etc/expertd-tls/",
        ),
        (
            {**NOTES_TLS, "callersSecret": "c"},
            {"ca", "server_name", "certificate", "key", "token_file"},
            "expertctl health",
        ),
    ],
)
def test_the_notes_have_a_client_and_a_command_that_the_server_lets_in(more, python, command, monkeypatch):
    """With the TLS that it asks for; a pod has no token of a caller, so it is then asked for its health only."""
    text = next(t for name, t in helm(more)["files"].items() if name.endswith("NOTES.txt"))
    (call,) = re.findall(r"ExpertCluster\(.*\)", text)
    (made,) = ast.parse(call).body
    given = {k.arg: k.value for k in made.value.keywords}
    assert (python is None) == (given == {})
    if python:
        assert (
            {k.arg for k in given["credentials"].keywords}
            == python
            <= {f.name for f in dataclasses.fields(Credentials)}
        )
    (words,) = re.findall(r"demo-expertd-cpu-s0-0 -- (.*)", text)
    assert words.startswith(command)
    read(words.split(), monkeypatch)
    if more:
        assert {"--server-name=b", "--cert=/etc/expertd-tls/tls.crt", "--key=/etc/expertd-tls/tls.key"} < set(
            words.split()
        )


def test_helm_test_asks_every_shard_and_calls_them_as_one(rendered, monkeypatch):
    """Its commands, read by the parser; its pod is none of those that the Service finds."""
    (pod,) = (o for (kind, _), o in rendered.items() if kind == "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (service,) = (o for (kind, _), o in rendered.items() if kind == "Service")
    assert not service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (c,) = pod["spec"]["containers"]
    commands = [line.split() for line in c["args"][0].splitlines() if line]
    for words in commands:
        read(words, monkeypatch)
    pods = set()
    for name in sets(rendered):
        host = service["metadata"]["name"] + ".prod.svc"
        pods.add(f"{name}-0.{host}:{service['spec']['ports'][0]['port']}")
    assert {words[2] for words in commands if words[1] == "health"} == pods
    volumes = [v["name"] for s in sets(rendered).values() for v in s["spec"]["template"]["spec"]["volumes"]]
    loads = [words for words in commands if words[1] == "load"]
    assert [pods <= set(words) for words in loads] == ([] if "callers" in volumes else [True])


MOVES = {"admin": {"enabled": True}}
BEHIND_TLS = {"tls": {"secretName": "a", "serverName": "b"}, "callersSecret": "c", **MOVES}
ADMINS = {"networkPolicy": {"admins": [{"podSelector": {"matchLabels": {"a": "b"}}}]}}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (MOVES, "want tls.secretName and callersSecret"),
        (BEHIND_TLS, "networkPolicy.admins: got nobody"),
        ({**BEHIND_TLS, **ADMINS, "groups": {"cpu": {"cacheSize": ""}}}, "groups.cpu has no cacheSize"),
        ({**BEHIND_TLS, **ADMINS, "groups": {"cpu": {"autoscaling": {"enabled": True}}}}, "want one of the two"),
        ({"serve": {"admin-listen": "0.0.0.0:1"}}, r"serve\.admin-listen: the chart sets this option itself"),
        ({"serve": {"max-token": 3}}, r"serve\.max-token: no option of expertd serve; see docs/options\.md"),
        ({"groups": {"cpu": {"serve": {"max-token": 3}}}}, r"groups\.cpu\.serve\.max-token: no option"),
        ({"serve": {"max-token": False}}, "max-token: no option"),
        ({"serve": {"shard": "0/2"}}, r"serve\.shard: the chart sets this option itself"),
        ({"groups": {"cpu": {"serve": {"health": "no"}}}}, r"groups\.cpu\.serve\.health: the chart sets"),
        ({"serve": {"threads": [1]}}, "/serve/threads"),
        ({"tls": {"secretName": "a"}}, "tls.serverName"),
        ({"groups": {"cpu": {"kind": "tpu"}}}, "kind"),
        ({"groups": {"cpu": {"shards": {"first": 2, "count": 2, "of": 3}}}}, r"first \+ count <= of"),
        ({"grups": {}}, "grups"),
        ({"groups": {"cpu": {"copySpread": "yes"}}}, "copySpread"),
        (
            {"groups": {"cpu": {"serve": {"checkpoint": "/m"}}}},
            "groups.cpu: got checkpoint .* and synthetic .*, want one",
        ),
        ({"serve": {"synthetic": None}}, "groups.cpu: got neither checkpoint nor synthetic"),
        ({"serve": {"synthetic": None, "checkpoint": "/models/a"}}, "models.volume is empty"),
        ({"serve": {"channelz": False}}, "serve.channelz: got the boolean false, want the option's word in quotes"),
        ({"groups": {"cpu": {"serve": {"expert-metrics": True}}}}, "serve.expert-metrics: got the boolean true"),
        ({"serve": {"traces": "yes"}}, "serve.traces: the images have no exporter"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(wrong, said):
    assert re.search(said, helm(wrong)["error"])


def test_a_misspelt_option_is_the_only_thing_that_is_said():
    said = helm({"serve": {"max-tokenz": 5, "synthetic": None}})["error"]
    assert said.count("max-token") == 1
    assert "want one of them" not in said


def test_every_option_is_taken_or_set_by_the_chart():
    import yaml

    from expertd_server.config.options import OPTIONS

    found = yaml.safe_load((CHART / "options.yaml").read_text())
    assert sorted([*found["values"], *found["chart"]]) == sorted(o.flag.removeprefix("--") for o in OPTIONS)
    taken = dict.fromkeys(set(found["values"]) - {"checkpoint", "traces"}, "x")
    assert "error" not in helm({"serve": taken})


def group(first: int, count: int, of: int, **more) -> dict:
    return {"kind": "cpu", "shards": {"first": first, "count": count, "of": of}, **more}


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"a": group(0, 3, 4)}, "no group serves shard 3 of 4 "),
        ({"a": group(2, 6, 8)}, "no group serves shards 0 to 1 of 8 "),
        ({"a": group(0, 2, 8), "b": group(6, 2, 8), "c": group(1, 2, 8)}, "no group serves shards 3 to 5 of 8 "),
        ({"a": group(0, 1, 2), "b": group(6, 2, 8)}, "no group serves the experts from 1/2 to 6/8 of each layer"),
        (
            {"a": group(0, 4, 4), "b": group(0, 3, 8)},
            r"groups.a .* 0/4 to 4/4 .* groups.b from 0/8 to 3/8: some experts",
        ),
        ({"a": group(0, 2, 3), "b": group(1, 1, 2)}, "groups.a serves experts from 0/3 to 2/3 of each layer, groups.b"),
    ],
)
def test_shards_that_do_not_make_a_whole_layer_are_refused(groups, said):
    assert re.search(said, helm({"groups": {"cpu": None, **groups}})["error"])


@pytest.mark.parametrize(
    "groups",
    [
        {"a": group(0, 2, 4), "b": group(2, 2, 4)},
        {"a": group(0, 4, 4, copies=2), "b": group(1, 2, 4)},  # two shards with a copy more
        {"a": group(0, 4, 4), "b": group(1, 2, 4, updateStrategy="OnDelete")},
        {"a": group(0, 1, 2), "b": group(2, 2, 4)},  # other sizes, no overlap
        {"a": group(0, 4, 4), "b": group(0, 6, 6, copies=2)},  # the same range: replicas, cut in another way
        {"a": group(2, 3, 9), "b": group(0, 2, 9), "c": group(5, 4, 9)},
    ],
)
def test_shards_that_make_a_whole_layer_are_rendered(groups):
    assert "error" not in helm({"groups": {"cpu": None, **groups}})


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"a": group(0, 4, 4), "b": group(1, 2, 4)}, "1/4 to 2/4"),
        ({"a": group(0, 4, 4), "b": group(0, 6, 6)}, "0/4 to 1/4"),
        (
            {"a": group(0, 2, 4), "b": group(0, 4, 4), "c": group(1, 3, 4, copies=2)},
            "0/4 to 1/4",
        ),
    ],
)
def test_copies_that_an_upgrade_would_replace_at_once_are_refused(groups, said):
    refused = helm({"groups": {"cpu": None, **groups}})["error"]
    assert f"groups.a and groups.b have one copy each of the experts from {said} of each layer" in refused
    assert "want copies: 2 in one of the groups, or updateStrategy: OnDelete in all but one" in refused


def test_a_copy_is_replaced_when_clients_know_the_one_before():
    for s in sets(objects({})).values():
        assert s["spec"]["minReadySeconds"] == 30
        assert s["spec"]["updateStrategy"] == {"type": "RollingUpdate"}
    chosen = {"minReadySeconds": 7, "groups": {"cpu": {"updateStrategy": "OnDelete"}}}
    for s in sets(objects(chosen)).values():
        assert s["spec"]["minReadySeconds"] == 7
        assert s["spec"]["updateStrategy"] == {"type": "OnDelete"}


def test_a_name_too_long_for_kubernetes_is_refused():
    """A StatefulSet's name goes with a hash into a label of 63 letters."""
    groups = {"groups": {"cpu": None, "a" * 20: group(0, 1, 1)}}
    assert "error" not in helm(groups, "r" * 20)
    assert "has 55 letters, and Kubernetes takes 52; want a shorter name" in helm(groups, "r" * 23)["error"]


def images(values) -> set[str]:
    rendered = objects(values)
    (pod,) = (o for (kind, _), o in rendered.items() if kind == "Pod")
    (call,) = pod["spec"]["containers"]
    found = {container(s)["image"] for s in sets(rendered).values()}
    assert call["image"] in found
    return found


def test_the_image_is_that_of_the_charts_version_and_the_groups_kind():
    assert images({}) == {f"expertd:{VERSION}-cpu"}
    two = {"cpu": group(0, 1, 2), "gpu": {**group(1, 1, 2), "kind": "cuda"}}
    assert images({"groups": two}) == {f"expertd:{VERSION}-cpu", f"expertd:{VERSION}-cuda"}
    assert images({"image": {"tag": "mine"}}) == {"expertd:mine"}
    two["gpu"]["imageTag"] = "mine-gpu"
    assert images({"groups": two, "image": {"tag": "mine"}}) == {"expertd:mine", "expertd:mine-gpu"}
    del two["gpu"]["imageTag"]
    refused = helm({"groups": two, "image": {"tag": "mine"}})["error"]
    assert 'got "mine" for groups of the kinds cpu, cuda' in refused


def test_the_chart_has_the_version_of_the_package():
    chart = Path(CHART / "Chart.yaml").read_text()
    assert f'appVersion: "{VERSION}"' in chart


def test_files_and_papers_name_the_images_of_this_version():
    """What is built by the papers is what the chart asks for."""
    texts = [*(ROOT / "deploy").rglob("*"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    named = [
        (p.name, tag)
        for p in texts
        if p.is_file() and "__pycache__" not in p.parts
        for tag in re.findall(r"\bexpertd:((?!50051)[\w.-]+)", p.read_text(errors="replace"))
    ]
    kinds = {f"{VERSION}-{kind}" for kind in ("cpu", "cuda", "rocm", "xpu")}
    assert {tag for _, tag in named} - kinds == set(), named
    assert {name for name, _ in named} >= {"Dockerfile", "deploy.md", "apply.yaml", "compose.yaml"}
