"""The scripts of jobs/, run with a fake srun, and with a real mpirun."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcstrat.testing.launcher import clean_environment
from tests.docs.said import assert_said

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "jobs").glob("*.sbatch"))
# Scripts for other schedulers, with each scheduler's variables for two ranks.
OTHERS = sorted(
    path
    for path in (ROOT / "jobs").glob("*/*.*")
    if path.suffix in (*(".pbs", ".flux", ".lsf", ".sge"),)
)
# A fake srun that skips its options, and runs the program once.
SRUN = """#!/bin/sh
while case "$1" in -*) true;; *) false;; esac; do shift; done
exec "$@"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder with the scripts, a program, and an srun."""
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs", ignore=lambda *_: ["data"])
    (tmp_path / "program.py").write_text("import sys; print('ran', sys.argv[1:])")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/srun").write_text(SRUN)
    (tmp_path / "bin/srun").chmod(0o755)
    return tmp_path


def _submit(
    project: Path, script: str, *words: str, folder: str = ".", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a copy of a script in another folder, as Slurm does."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "CONDA"))}
    kept |= {
        "PATH": f"{project / 'bin'}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(project / folder),
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "1",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        ["bash", project / "jobs" / script, *words],
        check=False,
        capture_output=True,
        text=True,
        cwd="/",
        env=kept | environment,
        timeout=60,
    )


# Functions that Lmod and Environment Modules define when their file is sourced. Some
# functions read variables that may be unset.
INIT = """module() {
    : "$LOADEDMODULES$LMOD_CMD"
    [[ $1 == load && $2 == there ]] && export PYTHONHASHSEED=7
}
"""


def test_modules_are_loaded_where_the_shell_of_the_job_has_none(project: Path) -> None:
    _make_environment(project / ".venv")
    path = project / "jobs/site.env"
    words = path.read_text().replace("site_modules=()", "site_modules=(there)")
    path.write_text(
        words + 'site_after_modules() { export AFTER="$PYTHONHASHSEED"; }\n'
    )
    (project / "modules/init").mkdir(parents=True)
    (project / "modules/init/bash").write_text(INIT)
    program = "import os; print(os.environ['PYTHONHASHSEED'], os.environ['AFTER'])"
    (project / "program.py").write_text(program)
    home = {"MODULESHOME": str(project / "modules")}
    finished = _submit(project, "cpu.sbatch", "program.py", **home)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "7 7\n"
    path.write_text(words.replace("(there)", "(gcc openmpi)"))
    finished = _submit(project, "cpu.sbatch", "program.py", **home)
    assert finished.returncode == 1
    assert_said("no-module", finished.stderr)


@pytest.mark.parametrize("script", [path.name for path in SCRIPTS])
def test_scripts_say_what_is_missing(project: Path, script: str) -> None:
    elsewhere = _submit(project, script, folder="bin")
    assert elsewhere.returncode == 1
    assert_said("no-site", elsewhere.stderr)
    bare = _submit(project, script)
    assert bare.returncode == 1
    if script == "container.sbatch":
        assert_said("no-apptainer", bare.stderr)
    else:
        assert_said("no-environment", bare.stderr)
        assert str(project / ".venv") in bare.stderr


def test_a_missing_image_is_named(project: Path) -> None:
    (project / "bin/apptainer").symlink_to("/bin/true")
    finished = _submit(project, "container.sbatch")
    assert finished.returncode == 1
    assert_said("no-image", finished.stderr)
    assert str(project / "hpcstrat.sif") in finished.stderr


@pytest.mark.parametrize("script", ["cpu.sbatch", "gpu.sbatch", "train_elastic.sbatch"])
def test_scripts_ask_for_the_program(project: Path, script: str) -> None:
    _make_environment(project / ".venv")
    finished = _submit(project, script)
    assert finished.returncode == 1
    assert f"sbatch jobs/{script} PROGRAM" in finished.stderr


def _make_environment(folder: Path) -> None:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").symlink_to(sys.executable)
    activate = f'PATH="{folder}/bin:$PATH"; : "$UNSET_VARIABLE"\n'
    (folder / "bin/activate").write_text(activate)


def test_a_program_runs_in_its_environment(project: Path) -> None:
    _make_environment(project / ".venv")
    finished = _submit(project, "cpu.sbatch", "program.py", "--epochs", "3")
    assert finished.returncode == 0, finished.stderr
    assert "ran ['--epochs', '3']" in finished.stdout


def test_an_environment_without_hpcstrat_is_named(project: Path) -> None:
    _make_environment(project / ".venv")
    (project / "nothing/hpcstrat").mkdir(parents=True)
    (project / "nothing/hpcstrat/__init__.py").write_text("raise ImportError")
    words = {"PYTHONPATH": str(project / "nothing")}
    finished = _submit(project, "cpu.sbatch", "program.py", **words)
    assert finished.returncode == 1
    assert_said("no-hpcstrat", finished.stderr)


def test_conda_environments(project: Path) -> None:
    missing = _submit(project, "cpu.sbatch", "program.py", SITE_CONDA="science")
    assert missing.returncode == 1
    assert_said("no-conda", missing.stderr)
    _make_environment(project / "envs/science")
    conda = project / "bin/conda"
    # `conda shell.bash hook` prints a function that activates environments.
    conda.write_text(
        "#!/bin/sh\necho 'conda() { . \""
        + str(project)
        + '/envs/$2/bin/activate"; echo "$1 $2"; }\'\n'
    )
    conda.chmod(0o755)
    finished = _submit(project, "cpu.sbatch", "program.py", SITE_CONDA="science")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines() == ["activate science", "ran []"]


def test_logs_go_where_there_is_a_folder(project: Path) -> None:
    """Slurm creates no folders, and a job that cannot write its log fails silently."""
    command = ". jobs/site.env && echo $SBATCH_OUTPUT"
    said = subprocess.run(
        ["bash", "-eu", "-c", command],
        check=True,
        capture_output=True,
        text=True,
        cwd=project,
    )
    assert said.stdout == f"{project}/logs/%x-%j.out\n"
    assert (project / "logs").is_dir()
    for path in SCRIPTS:
        # The log is in the working folder, without settings in site.env.
        assert "#SBATCH --output=slurm-%x-%j.out\n" in path.read_text()


def test_every_script_is_submitted_to_a_real_slurm() -> None:
    modules = [ROOT / f"tests/cluster/{name}.py" for name in ("test_jobs", "watched")]
    source = "".join(module.read_text() for module in modules)
    assert [path.name for path in SCRIPTS if f'"{path.name}"' not in source] == []


def _run_on_one_host(
    project: Path, script: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of PBS, LSF or SGE as a job with two ranks on this host."""
    nodes = project / "nodes"
    host = platform.node()
    lines = (
        [f"{host} 2 all.q@{host} UNDEFINED"] if script.suffix == ".sge" else [host] * 2
    )
    nodes.write_text("".join(f"{line}\n" for line in lines))
    job = {
        ".pbs": {
            "PBS_JOBID": "7.server",
            "PBS_JOBNAME": "name",
            "PBS_NODEFILE": str(nodes),
            "PBS_O_WORKDIR": str(project),
        },
        ".lsf": {
            "LSB_JOBID": "7",
            "LSB_JOBNAME": "name",
            "LSB_MCPU_HOSTS": f"{host} 2",
            "LS_SUBCWD": str(project),
        },
        ".sge": {
            "JOB_ID": "7",
            "JOB_NAME": "name",
            "SGE_TASK_ID": "undefined",
            "PE_HOSTFILE": str(nodes),
            "SGE_O_WORKDIR": str(project),
        },
    }[script.suffix]
    schedulers = ("SLURM", "CONDA", "PBS", "LSB", "FLUX", "SGE", "JOB_")
    kept = {
        k: v for k, v in clean_environment().items() if not k.startswith(schedulers)
    }
    # Allow a real mpirun to run as root, and with more ranks than cores.
    more = {
        f"{a}_ALLOW_RUN_AS_ROOT{b}": "1"
        for a in ("OMPI", "PRTE")
        for b in ("", "_CONFIRM")
    }
    more["PRTE_MCA_hwloc_default_binding_policy"] = "none"
    own = {"PYTHONPATH": str(ROOT), "SITE_VENV": sys.prefix, "TMPDIR": str(project)}
    words = environment.get("PROGRAM", "").split()
    return subprocess.run(
        [
            "bash",
            project / script.relative_to(ROOT),
            *(words if script.suffix == ".sge" else ()),
        ],
        check=False,
        capture_output=True,
        text=True,
        cwd=project,
        env={**kept, **more, **own, **job, **environment},
        timeout=120,
    )


@pytest.mark.parametrize("script", OTHERS, ids=lambda path: path.name)
def test_scripts_of_other_schedulers_say_what_is_missing(
    project: Path, script: Path
) -> None:
    text = script.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    # A script must say whether and where it was tested.
    assert re.search(r"^# (Ran on |Not run: )", text, re.MULTILINE)
    if script.suffix == ".flux":
        return
    bare = _run_on_one_host(project, script, SITE_VENV="nowhere")
    assert bare.returncode == 1
    assert_said("no-environment", bare.stderr)
    none = _run_on_one_host(project, script)
    assert none.returncode == 1
    assert "expected a program, found none; " in none.stderr
    assert f"jobs/{script.parent.name}/{script.name}" in none.stderr
    (project / "jobs/site.env").unlink()
    elsewhere = _run_on_one_host(project, script)
    assert_said("no-site", elsewhere.stderr)


RANK = """
import os, sys
import hpcstrat as hs
strategy = hs.MultiWorkerMirroredStrategy()
hs.print_once("ranks", strategy.num_replicas_in_sync, os.environ.get("RUN_FOLDER"))
raise SystemExit(int((*sys.argv, 0)[1]))
"""


@pytest.mark.parametrize("name", ["pbs/cpu.pbs", "lsf/cpu.lsf", "sge/cpu.sge"])
def test_ranks_are_started_in_the_slots_of_the_job(project: Path, name: str) -> None:
    """A real mpirun starts the ranks; tests/cluster uses real schedulers."""
    (project / "program.py").write_text(RANK)
    script = ROOT / "jobs" / name
    finished = _run_on_one_host(project, script, PROGRAM="program.py")
    assert finished.returncode == 0, finished.stderr
    assert "ranks 2 None" in finished.stdout


@pytest.mark.parametrize(
    ("name", "folder", "said", "status"),
    [
        ("lsf/restart.lsf", "runs/name-7", "LSF requeues job 7", 42),
        ("sge/restart.sge", "runs/name-7", "requeueing job 7", 99),
    ],
)
def test_a_program_that_has_saved_is_started_again(
    project: Path, name: str, folder: str, said: str, status: int
) -> None:
    """The exit status requests the restart, by an option in the head (LSF: -Q 42)."""
    (project / "program.py").write_text(RANK)
    script = ROOT / "jobs" / name
    finished = _run_on_one_host(project, script, PROGRAM="program.py 42")
    assert finished.returncode == status, finished.stderr
    assert f"ranks 2 {folder}" in finished.stdout
    assert f"all is saved: {said}" in finished.stdout


# A program that fails, with a new checkpoint if it is told so.
FAILS = """
import os, sys
if sys.argv[2:]:
    open(os.environ["RUN_FOLDER"] + "/ckpt-0000000001.h5", "w").close()
raise SystemExit(int(sys.argv[1]))
"""


def _run_restart(project: Path, name: str, words: str) -> tuple[int, str]:
    """Return status and output of a restart script, which runs ``FAILS`` once."""
    (project / "program.py").write_text(FAILS)
    # The launcher of the site starts one rank.
    for command, line in (("scontrol", 'echo "asks scontrol $*"'), ("one", '"$@"')):
        (project / "bin" / command).write_text(f"#!/bin/sh\n{line}\n")
        (project / "bin" / command).chmod(0o755)
    site = project / "jobs/site.env"
    site.write_text(site.read_text().replace("launcher=()", "launcher=(one)", 1))
    if name.endswith("sbatch"):
        if not (project / ".venv").exists():
            _make_environment(project / ".venv")
        line = ["program.py", *words.split()]
        done = _submit(project, name, *line, SLURM_JOB_NAME="name")
    else:
        path = f"{project / 'bin'}:{os.environ['PATH']}"
        script = ROOT / "jobs" / name
        done = _run_on_one_host(
            project, script, PROGRAM=f"program.py {words}", PATH=path
        )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "again"),
    [("restart.sbatch", 3), ("lsf/restart.lsf", 42), ("sge/restart.sge", 99)],
)
def test_an_end_without_completion_marker_is_followed_by_a_run(
    project: Path, name: str, again: int
) -> None:
    """A lost node looks like any error; endless errors do not cause endless runs."""
    marker = project / "runs/name-7/done"
    # With a new checkpoint, the count starts again.
    for words, failure in (("3", 1), ("3", 2), ("3 saves", 1), ("3", 2), ("3", 3)):
        status, said = _run_restart(project, name, words)
        assert status == again, said
        assert f"(failure {failure} in a row, 3 are allowed): " in said
    assert ("asks scontrol requeue 7" in said) == (name == "restart.sbatch")
    status, said = _run_restart(project, name, "3")
    assert status == 3
    assert "4 times without a new checkpoint in runs/name-7; correct it" in said
    assert "asks scontrol" not in said
    assert not marker.exists()
    assert _run_restart(project, name, "0")[0] == 0
    assert marker.exists()
    status, said = _run_restart(project, name, "3")
    assert status == 0
    assert "the program has come to its end" in said


QSTAT = """#!/bin/sh
echo '    Resource_List.select = 1:ncpus=2'
echo '    Resource_List.walltime = 9'
"""


def test_a_job_of_pbs_submits_the_one_that_follows(project: Path) -> None:
    (project / "program.py").write_text(RANK)
    for name, text in (("qstat", QSTAT), ("qsub", '#!/bin/sh\necho "qsub $*"')):
        (project / "bin" / name).write_text(text)
        (project / "bin" / name).chmod(0o755)
    script = ROOT / "jobs/pbs/restart.pbs"
    path = f"{project / 'bin'}:{os.environ['PATH']}"
    finished = _run_on_one_host(project, script, PROGRAM="program.py 42", PATH=path)
    assert finished.returncode == 42, finished.stderr
    assert (
        "qsub -l select=1:ncpus=2 -l walltime=9 "
        "-v PROGRAM=program.py 42,RUN_FOLDER=runs/name-7 "
        "-W depend=afterany:7.server jobs/pbs/restart.pbs"
    ) in finished.stdout
