"""scripts/slurm/train.sbatch, run with a `srun` that starts two nodes on this machine: it is stopped and queued again,
and its run goes on with one rank."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.sweep.sweeps import PAYOFF, QUICK, ROOT, program

SCRIPT = ROOT / "scripts" / "slurm" / "train.sbatch"
SCONTROL = """#!/usr/bin/env bash
case $1 in
    show) echo localhost ;;
    requeue) echo "$2" >> requeued ;;
esac
"""
SRUN = """#!/usr/bin/env bash
# A task for each node, on this machine. A signal goes on to all.
shift # --kill-on-bad-exit=0
tasks=()
trap 'kill -TERM "${tasks[@]}"' TERM
for node in $(seq "$SLURM_NNODES"); do
    "$@" > "node$node.log" 2>&1 &
    tasks+=($!)
done
status=0
for task in "${tasks[@]}"; do
    while kill -0 "$task" 2> /dev/null; do wait "$task" || true; done # ended by a signal, it waits again
    wait "$task" || status=$?
done
exit $status
"""
ENDLESS = 10**6
"""Number of training steps."""


@pytest.fixture
def cluster(tmp_path):
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "payoff.py").write_text(PAYOFF)
    return tmp_path


def submit(folder, nodes, *words, python=sys.executable):
    environment = {
        **{**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        **{"SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": str(nodes), "SLURM_JOB_NODELIST": "fake[0-1]"},
        **{"PYTHON": python, "RANKS": "1"},
    }
    return subprocess.Popen(["bash", SCRIPT, *words], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE)


def logs(folder):
    return "".join(path.read_text() for path in sorted(folder.glob("node*.log")))


def steps(run):
    path = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
@pytest.mark.ci
def test_a_stopped_job_is_queued_again_and_resumes(cluster):
    words = [*QUICK, "environment.config.payoff=0.5", f"trainer.max_steps_without_signal={ENDLESS}"]
    words += ["evaluation.every_steps=0", "trainer.save_trajectories_every=0", "trainer.checkpoint.every_steps=1000"]
    job = submit(cluster, 2, *words, f"trainer.max_steps={ENDLESS}")
    run = cluster / "outputs" / "slurm" / str(os.getpid())
    try:
        deadline = time.monotonic() + 240
        while len(steps(run)) < 3:
            assert job.poll() is None and time.monotonic() < deadline, logs(cluster)
            time.sleep(0.2)
    finally:
        job.send_signal(signal.SIGTERM)  # as --signal=B:TERM@120, which signals only the script; else the ranks remain
        said, _ = job.communicate(timeout=120)
    assert job.returncode == 0 and "saved and queued again" in said, logs(cluster)
    assert (cluster / "requeued").read_text() == f"{os.getpid()}\n"
    assert "sharded over 2 ranks" in logs(cluster)
    reached = steps(run)[-1]
    assert (run / "checkpoints" / f"step_{reached:06}").is_dir()

    # The same on one node with one rank, without torchrun's agent.
    again = program(cluster, *words, f"trainer.max_steps={reached + 2}", f"run_dir={run}", "resume=latest")
    assert again.returncode == 0 and f"at step {reached}" in again.stdout, again.stdout + again.stderr
    assert steps(run) == list(range(reached + 3))


def test_a_job_that_fails_is_not_queued_again(cluster):
    job = submit(cluster, 2, "seed=1", python="false")
    job.communicate(timeout=120)
    assert job.returncode == 1 and not (cluster / "requeued").exists()


def test_every_node_gets_the_same_command(cluster):
    job = submit(cluster, 2, "name=a b", "run_dir=runs/mine", python="echo")
    job.communicate(timeout=120)
    said = {(cluster / f"node{node}.log").read_text() for node in (1, 2)}
    number = os.getpid()
    ranks = "-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --shutdown-timeout 100 --rdzv-backend c10d"
    place = f"--rdzv-endpoint localhost:{20000 + number % 10000} --rdzv-id {number}"
    assert said == {f"{ranks} {place} -m mtrl.main name=a b run_dir=runs/mine resume=latest\n"}


def test_the_folder_that_the_command_names_is_that_of_the_run_with_hydras_signs_too(cluster):
    job = submit(cluster, 1, "+run_dir=mine", python="echo")
    job.communicate(timeout=120)
    assert logs(cluster).endswith("-m mtrl.main +run_dir=mine resume=latest\n")


def test_the_run_that_the_command_begins_from_counts_until_the_job_has_a_checkpoint(cluster, monkeypatch):
    def words():
        submit(cluster, 1, "resume=outputs/x/RUN", "run_dir=mine", python="echo").communicate(timeout=120)
        return logs(cluster).partition("mtrl.main ")[2].strip()

    assert words() == "resume=outputs/x/RUN run_dir=mine"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert words() == "resume=outputs/x/RUN run_dir=mine", "it was stopped before its first checkpoint"
    (cluster / "mine" / "checkpoints" / "step_000003").mkdir(parents=True)
    assert words() == "resume=outputs/x/RUN run_dir=mine resume=latest"


def test_tasks_get_the_cores_of_the_job(cluster, monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "48")
    (cluster / "cores").write_text('#!/bin/sh\necho "$SRUN_CPUS_PER_TASK"\n')
    (cluster / "cores").chmod(0o755)
    submit(cluster, 2, python=str(cluster / "cores")).communicate(timeout=120)
    assert logs(cluster) == "48\n48\n"
