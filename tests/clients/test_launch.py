"""What launches a script on several hosts: files of examples/launch/, run as two hosts on this machine, or read."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCH = EXAMPLES / "launch"
LIMIT = 400  # seconds; each process imports everything first
TINY = {"layers": 1, "hidden": 32, "heads": 2, "kv-heads": 2, "length": 32, "batch": 4, "micro-batch": 4, "steps": 2}


def begin(folder: Path, *command: str, **variables: str) -> subprocess.Popen[str]:
    """Start a command as on a host of its own, in a folder that has the examples."""
    folder.mkdir(exist_ok=True)
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(EXAMPLES)
    left_out = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": "", **variables}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True)  # fmt: skip


def commands(folder: Path, scripts: dict[str, str]) -> str:
    """Return a PATH on which there are commands that run the given scripts of bash."""
    folder.mkdir()
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    return os.pathsep.join((str(folder), str(Path(sys.executable).parent), os.environ["PATH"]))


def end(process: subprocess.Popen[str]) -> str:
    """Return what a process prints until it has ended well."""
    try:
        text, _ = process.communicate(timeout=LIMIT)
    finally:
        process.terminate()
    assert process.returncode == 0, text
    return text


@pytest.mark.nightly
def test_two_hosts_of_torchrun(tmp_path):
    pytest.importorskip("transformers")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    line = ("bash", str(LAUNCH / "torchrun.sh"), "localhost", "examples/resume.py", "--tp", "2", "--until", "2")
    # Of this interpreter, which need not be where torch's own command is.
    path = commands(tmp_path / "bin", {"torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"'})
    hosts = [begin(tmp_path, *line, DEVICES="2", PORT=port, PATH=path) for _ in range(2)]
    printed = [end(host) for host in hosts]
    assert "0 steps are done; tp 2 x dp 2" in "".join(printed)
    assert len(re.findall(r"^step \d: loss", "".join(printed), re.M)) == 2  # on one of them


@pytest.mark.nightly
def test_a_job_of_slurm_goes_on_until_its_model_is_there(tmp_path):
    """The stubs do what srun and scontrol do: start ranks with its variables, and write down that there is more."""
    pytest.importorskip("transformers")
    srun = """
        shift
        export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost SLURM_STEP_ID=0
        SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & one=$!
        SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & two=$!
        wait $one && wait $two
    """
    path = commands(tmp_path / "bin", {"srun": srun, "scontrol": 'echo "$@" >> requeued'})
    job = ("bash", str(LAUNCH / "slurm.sh"), "--tp", "2", *(f"--{name}={value}" for name, value in TINY.items()))
    variables = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": str(os.getpid() % 10000), "PATH": path}
    end(begin(tmp_path, *job, **variables))
    assert (tmp_path / "runs" / "pretrain" / "model" / "config.json").exists()
    assert not (tmp_path / "requeued").exists()
    (tmp_path / "bin" / "srun").write_text("#!/bin/bash\n")  # ended before its time, with what it had saved
    end(begin(tmp_path, *job, **variables, OUTPUT=str(tmp_path / "other")))
    assert (tmp_path / "requeued").read_text() == f"requeue {variables['SLURM_JOB_ID']}\n"


@pytest.mark.nightly
def test_ray_train(tmp_path):
    pytest.importorskip("ray.train")
    pytest.importorskip("transformers")
    from transformers import LlamaForCausalLM

    # Where more runs than there are cores, workers take longer than the half a minute that Ray gives them.
    text = end(begin(tmp_path, sys.executable, "examples/launch/ray_train.py", "--storage", "out",
                     RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S="300"))  # fmt: skip
    losses = [float(loss) for _, loss in sorted(set(re.findall(r"step (\d): loss ([\d.]+)", text)))]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    LlamaForCausalLM.from_pretrained(tmp_path / "out" / "model")


#: Fields of a PyTorchJob in the operator's 1.9: `pytorch_types.go`, `common_types.go` of kubeflow/training-operator.
FIELDS = {
    "spec": {"runPolicy", "elasticPolicy", "pytorchReplicaSpecs", "nprocPerNode"},
    "runPolicy": {
        "cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit", "schedulingPolicy",
        "suspend", "managedBy",
    },
    "elasticPolicy": {
        "minReplicas", "maxReplicas", "rdzvBackend", "rdzvPort", "rdzvHost", "rdzvId", "rdzvConf", "standalone",
        "nProcPerNode", "maxRestarts", "metrics",
    },
    "pytorchReplicaSpecs": {"Master", "Worker"},
    "Worker": {"replicas", "template", "restartPolicy"},
}  # fmt: skip


def documents(name: str) -> list[dict]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((LAUNCH / name).read_text()))


def test_the_pytorchjob_has_fields_that_the_operator_knows():
    (job,) = documents("pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert job.keys() == {"apiVersion", "kind", "metadata", "spec"}
    spec = job["spec"]
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    for name, found in {"spec": spec, **spec, "Worker": worker}.items():
        if isinstance(found, dict):
            assert found.keys() <= FIELDS[name], name
    assert isinstance(spec["nprocPerNode"], str)
    assert spec["elasticPolicy"]["minReplicas"] == spec["elasticPolicy"]["maxReplicas"] == worker["replicas"]
    assert worker["restartPolicy"] in {"Always", "OnFailure", "Never", "ExitCode"}
    assert spec["runPolicy"]["cleanPodPolicy"] in {"All", "Running", "None"}
    assert [container["name"] for container in worker["template"]["spec"]["containers"]] == ["pytorch"]


@pytest.mark.parametrize("name", ["pytorchjob.yaml", "job.yaml"])
def test_what_a_pod_runs_is_there(name):
    *service, job = documents(name)
    spec = job["spec"]
    template = spec["template"] if "template" in spec else spec["pytorchReplicaSpecs"]["Worker"]["template"]
    (container,) = template["spec"]["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in template["spec"]["volumes"]}
    line = " ".join([*container["command"], *container.get("args", [])])
    (script,) = re.findall(r"examples/(\S+)", line)
    source = (EXAMPLES / script).read_text()
    for option in re.findall(r" --(\w+)", line.partition(script)[2]):
        assert re.search(rf"^    {option}: ", source, re.M), option
    devices = container["resources"]["limits"]["nvidia.com/gpu"]
    (ranks,) = re.findall(r"--nproc-per-node (\d+)", line) or [spec["nprocPerNode"]]
    (tp,) = re.findall(r"--tp (\d+)", line)
    assert int(ranks) == int(tp) == devices
    if service:
        assert service[0]["metadata"]["name"] == template["spec"]["subdomain"]
        assert service[0]["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
        assert f"--master-addr {job['metadata']['name']}-0.{service[0]['metadata']['name']} " in line
        assert spec["completions"] == int(re.findall(r"--nnodes (\d+)", line)[0])
