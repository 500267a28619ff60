"""The job files of docs/clusters: what they start is what the command line takes.

They were run on clusters of one machine by hand. Here stand-ins of SLURM's commands start the
processes, and the stand-in of sdattn writes down what it is given.
"""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from helpers.command_lines import COMMANDS

DOCS = Path(__file__).parents[2] / "docs"
CLUSTERS = DOCS / "clusters"
SBATCH = re.compile(r"^(?:# |job=\$\()?sbatch .*?(\S+\.sbatch) ([^\n)]*)", re.MULTILINE)
STAND_INS = {
    "srun": """
        while [[ $1 == --* ]]; do echo "srun $1" >> said; shift; done
        for i in 0 1 2; do SLURM_PROCID=$i SLURM_LOCALID=$((i % 2)) SLURM_NTASKS=3 "$@"; done
        exit "$EXIT" """,
    "scontrol": """
        if [[ $1 == show ]]; then printf '%s\\n' n7 n8; else echo "scontrol $*" >> said; fi""",
    "sdattn": """
        echo "$RANK $LOCAL_RANK $WORLD_SIZE $OMP_NUM_THREADS" >> ranks
        printf '%q ' sdattn "$@" >> said; echo >> said""",
}


def parsed(words):
    """The values of a command's options, as the command line reads them."""
    assert words[0] == "sdattn", words
    context = COMMANDS[words[1]].make_context(words[1], list(words[2:]))
    return context.params


@pytest.fixture
def sbatch(tmp_path):
    """Run a job file with arguments; returns the code, what was said and each process's ranks."""
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)

    def run(file, *arguments, code=0, **variables):
        job = {"SLURM_JOB_ID": "31", "SLURM_JOB_NODELIST": "n[7-8]", "SLURM_CPUS_PER_TASK": "2"}
        path = f"{tmp_path}:/usr/bin:/bin"
        done = subprocess.run(
            ["bash", CLUSTERS / file, *arguments],
            env={"PATH": path, "EXIT": str(code), **job, **variables},
            cwd=tmp_path,
            check=False,
        )
        said = (tmp_path / "said").read_text(encoding="utf-8").splitlines()
        return done.returncode, said, (tmp_path / "ranks").read_text().splitlines()

    return run


def test_a_job_gives_each_process_its_rank_and_the_command(sbatch):
    asked = ["my prompts.jsonl", "--out", "RUN", "--set", "a=b c"]
    code, said, ranks = sbatch("sdattn.sbatch", *asked)
    assert code == 0
    assert ranks == ["0 0 3 2", "1 1 3 2", "2 0 3 2"]
    assert said[:3] == [
        f"srun {o}" for o in ("--kill-on-bad-exit=0", "--wait=0", "--cpus-per-task=2")
    ]
    assert [shlex.split(line) for line in said[3:]] == [["sdattn", "batch", *asked]] * 3


def test_a_job_of_an_array_leaves_its_part_to_the_variables(sbatch):
    asked = ["in.jsonl", "--out", "RUN"]
    _, said, _ = sbatch("sdattn-array.sbatch", *asked, SLURM_ARRAY_TASK_ID="3")
    values = parsed(shlex.split(said[-1]))
    assert (values["prompts"], str(values["folder"]), values["part"]) == ("in.jsonl", "RUN", None)
    text = (CLUSTERS / "sdattn-array.sbatch").read_text(encoding="utf-8")
    assert "#SBATCH --array=1-8\n" in text


@pytest.mark.parametrize("file", ["sdattn.sbatch", "sdattn-array.sbatch"])
@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [(143, "0", True), (137, "3", True), (143, "20", False), (0, "0", False), (1, "0", False)],
)
def test_a_job_that_a_signal_ended_is_requeued(sbatch, file, code, restarts, requeued):
    asked = {"SLURM_RESTART_COUNT": restarts, "SLURM_ARRAY_TASK_ID": "1"}
    found, said, _ = sbatch(file, "in.txt", "--out", "RUN", code=code, **asked)
    assert found == code
    assert ("scontrol requeue 31" in said) == requeued


def test_jobs_are_given_options_that_there_are():
    texts = [path.read_text(encoding="utf-8") for path in CLUSTERS.iterdir()]
    found = [line for text in texts for line in SBATCH.findall(text)]
    for file, given in found:
        assert (CLUSTERS / file).is_file()
        assert parsed(["sdattn", "batch", *shlex.split(given)])["model"] == "owner/name"
    assert len(found) == 4


def test_the_manifest_starts_a_command_that_there_is():
    job, claim = yaml.safe_load_all((CLUSTERS / "rayjob.yaml").read_text(encoding="utf-8"))
    values = parsed(shlex.split(job["spec"]["entrypoint"]))
    cluster = job["spec"]["rayClusterSpec"]
    head, [group] = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert (values["engine"], values["device"]) == ("ray", "cuda")
    assert values["workers"] == group["maxReplicas"]
    for pod in (head["template"]["spec"], group["template"]["spec"]):
        [container], [volume] = pod["containers"], pod["volumes"]
        [mount] = container["volumeMounts"]
        assert mount["name"] == volume["name"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert values["prompts"].startswith(f"{mount['mountPath']}/")
        assert Path(values["folder"]).is_relative_to(mount["mountPath"])
    page = (CLUSTERS / "ray.md").read_text(encoding="utf-8")
    assert f"rayproject/ray:{cluster['rayVersion']}-" in page
    assert f"'ray=={cluster['rayVersion']}'" in page


@pytest.mark.parametrize(
    "page", [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.stem
)
def test_pages_show_commands_with_options_that_there_are(page):
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["sdattn"] and words[1] in COMMANDS:
            parsed(words)
