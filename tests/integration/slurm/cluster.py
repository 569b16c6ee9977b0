"""A real SLURM on the loopback interface: one controller, two nodes of this machine with 8 counted GPUs each.

    python tests/integration/slurm/cluster.py install        # Debian, Ubuntu: apt-get; as root
    python tests/integration/slurm/cluster.py start FOLDER   # prints what to export
    python tests/integration/slurm/cluster.py stop FOLDER

Everything lies in FOLDER, its own munge key and socket included: a SLURM that the machine has is not touched. The
GPUs are terminals' device files, which SLURM counts and hands out, and on which nobody computes. There is no
accounting: sites without it are the harder case.
"""

from __future__ import annotations

import argparse
import getpass
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGES = ["slurmctld", "slurmd", "slurm-client", "munge", "slurm-wlm-basic-plugins"]
DAEMONS = ["munged", "slurmctld", "slurmd"]
CLIENTS = ["sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo", "sacct", "sacctmgr", "sshare"]
NODES, GPUS = ("n1", "n2"), 8

SLURM_CONF = """\
ClusterName=eyas
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
CommunicationParameters=NoAddrCache
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
MinJobAge=7200
KillWait=5
SchedulerParameters=sched_interval=2,bf_interval=2
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port=[{node_ports}] CPUs=32 SocketsPerBoard=1 \
CoresPerSocket=32 RealMemory=4000000 Gres=gpu:{gpus}
PartitionName=one Nodes={first} Default=YES State=UP MaxTime=INFINITE
PartitionName=pair Nodes={nodes} State=UP MaxTime=INFINITE
"""
GRES_CONF = "AutoDetect=off\n" + "".join(
    f"NodeName={name} Name=gpu File=/dev/tty[{GPUS * place}-{GPUS * place + GPUS - 1}]\n"
    for place, name in enumerate(NODES)
)


def find(program: str) -> str | None:
    """A daemon's path: Debian puts them where a user's PATH does not look."""
    return shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def missing() -> list[str]:
    return [program for program in [*DAEMONS, *CLIENTS] if find(program) is None]


def install() -> None:
    """Install SLURM's packages where they are not there; nothing of them is started."""
    if not missing():
        return
    if shutil.which("apt-get") is None or os.getuid() != 0:
        sys.exit(f"error: {', '.join(missing())} not found; install SLURM, or run this as root on Debian or Ubuntu")
    policy = Path("/usr/sbin/policy-rc.d")  # Debian's way to keep a package from starting its daemon
    keep = policy.exists()
    if not keep:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update", "-q"], env=environment, check=True)
        subprocess.run(
            ["apt-get", "install", "-y", "-q", "--no-install-recommends", *PACKAGES], env=environment, check=True
        )
    finally:
        if not keep:
            policy.unlink()


def free_ports(count: int) -> list[int]:
    """`count` neighbouring ports on which nobody listens."""
    for first in range(17000 + os.getpid() % 1000, 60000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return list(range(first, first + count))
        except OSError:
            continue
    raise OSError("no free ports")


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.1)


class Cluster:
    """The daemons of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.forgotten = 0  # jobs up to this number are not asked for

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs to find this cluster, also inside of its jobs."""
        path = os.pathsep.join([str(self.folder / "bin"), os.environ.get("PATH", os.defpath)])
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}

    def command(self, *words: str) -> str:
        """The output of one of SLURM's commands."""
        done = subprocess.run(words, env=os.environ | self.environment, capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def answers(self) -> bool:
        try:
            return self.command("scontrol", "ping").count("is UP") > 0
        except (RuntimeError, subprocess.TimeoutExpired):
            return False

    def configure(self) -> None:
        for name in ("state", "bin", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)  # munge wants no folder that others may write to
        controller, *nodes = free_ports(1 + len(NODES))
        values = {
            "folder": self.folder, "host": socket.gethostname().split(".")[0], "user": getpass.getuser(),
            "controller_port": controller, "node_ports": f"{nodes[0]}-{nodes[-1]}", "gpus": GPUS, "first": NODES[0],
            "nodes": f"n[1-{len(NODES)}]",
        }  # fmt: skip
        (self.folder / "slurm.conf").write_text(SLURM_CONF.format(**values))
        (self.folder / "gres.conf").write_text(GRES_CONF)
        # The executor takes SLURM_CONF away from its jobs, which look in /etc: these give it back.
        for program in CLIENTS:
            wrapper = self.folder / "bin" / program
            wrapper.write_text(f'#!/bin/sh\nSLURM_CONF={self.folder}/slurm.conf exec {find(program)} "$@"\n')
            wrapper.chmod(0o755)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))

    def run_daemon(self, *command: str) -> None:
        done = subprocess.run(
            [find(command[0]) or command[0], *command[1:]], env=os.environ | self.environment, capture_output=True,
            text=True, timeout=120,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)}: {done.stderr.strip() or done.stdout.strip()}")

    def start(self) -> None:
        self.configure()
        inside = {
            f"--{name}": self.folder / f"munge.{end}"
            for name, end in (
                ("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed")
            )
        }  # fmt: skip
        self.run_daemon("munged", "--force", *(f"{option}={path}" for option, path in inside.items()))
        self.start_controller()
        for node in NODES:
            self.run_daemon("slurmd", "-N", node)
        wait_for(self.all_idle, "nodes of the cluster become idle")

    def start_controller(self) -> None:
        self.run_daemon("slurmctld")
        wait_for(self.answers, "slurmctld answers")

    def all_idle(self) -> bool:
        return self.command("sinfo", "-h", "-N", "-p", "pair", "-o", "%N %t").split() == [
            word for node in NODES for word in (node, "idle")
        ]

    def pids(self, name: str = "*") -> list[int]:
        """The processes of daemons by the pattern of their names; their numbers are in files."""
        found = []
        for file in sorted(self.folder.glob(f"{name}.pid")):
            try:
                pid = int(file.read_text())
                os.kill(pid, 0)
            except (OSError, ValueError):
                continue
            found.append(pid)
        return found

    def end(self, pids: list[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        gone = time.monotonic() + 30
        for pid in pids:
            while Path(f"/proc/{pid}").exists():
                if time.monotonic() > gone:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)

    def stop_controller(self) -> None:
        """As in an outage: it keeps what it knows, and nobody answers."""
        self.end(self.pids("slurmctld"))

    def clear(self) -> None:
        """Cancel all jobs, and have all nodes take new ones."""
        self.command("scancel", "--user", getpass.getuser())
        wait_for(lambda: not self.command("squeue", "-h"), "jobs end", 60)
        for node in NODES:
            if "drain" in self.command("sinfo", "-h", "-n", node, "-p", "pair", "-o", "%t"):
                self.command("scontrol", "update", f"NodeName={node}", "State=RESUME")
        wait_for(self.all_idle, "nodes become idle")

    def stop(self) -> None:
        """Cancel all jobs, then end the daemons."""
        if self.answers():
            try:
                self.clear()
            except (RuntimeError, TimeoutError):
                pass
        for name in ("slurmd-*", "slurmctld", "munge"):
            self.end(self.pids(name))

    # ---- what tests ask ----

    def jobs(self) -> list[dict[str, str]]:
        """All jobs since `forget`, by scontrol's own names, in the order of their numbers."""
        text = self.command("scontrol", "--oneliner", "--detail", "show", "job")
        records = [_fields(line) for line in text.splitlines() if line.startswith("JobId=")]
        return sorted((job for job in records if int(job["JobId"]) > self.forgotten), key=lambda job: int(job["JobId"]))

    def forget(self) -> None:
        """Leave the jobs up to now out of `jobs`."""
        self.forgotten = max((int(job["JobId"]) for job in self.jobs()), default=self.forgotten)


def _fields(line: str) -> dict[str, str]:
    """`scontrol show --oneliner`: values may hold spaces; a field begins at a capital word and an equals sign."""
    found: dict[str, str] = {}
    name = ""
    for word in line.split(" "):
        key, equals, value = word.partition("=")
        if equals and key[:1].isupper() and re.fullmatch(r"[\w:/*]+", key):
            name, found[key] = key, value
        elif name:
            found[name] += f" {word}"
    return {name: value.strip() for name, value in found.items()}


@contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["install", "start", "stop"])
    parser.add_argument("folder", nargs="?", type=Path, help="where the cluster's files lie")
    args = parser.parse_args()
    if args.action == "install":
        install()
    elif args.folder is None:
        parser.error("name the cluster's folder")
    elif args.action == "stop":
        Cluster(args.folder).stop()
    else:
        args.folder.mkdir(parents=True, exist_ok=True)
        Cluster(args.folder).start()
        print(f"export SLURM_CONF={shlex.quote(str(args.folder.resolve() / 'slurm.conf'))}")
        print(f"export PATH={shlex.quote(str(args.folder.resolve() / 'bin'))}:$PATH")
