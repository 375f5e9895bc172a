"""`python -m pipeline init`: a luigi.cfg for this machine or a scheduler's, which the real loader accepts. Machines
that are not here have stand-ins: `nvidia-smi`, `neuron-ls`, `sinfo`, `kubectl`, which print what the real ones do."""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.commands.init import TARGETS
from pipeline.commands.init.choices import CHOICES, Text, draft_for
from pipeline.commands.init.surroundings import Nodes, Surroundings
from tests.helpers.chain import write_corpus
from tests.helpers.neuron_machine import hardware
from tests.helpers.support import ROOT, assert_one_line_error

#: What sinfo prints: the default partition, and another one.
SINFO = "debug*|4|{gres}|{features}|{limit}\nother|1|(null)|(null)|infinite\n"


def run(*words: str, cwd: Path, status: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    environment.pop("LUIGI_CONFIG_PATH", None)
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def init(folder: Path, *words: str, **env: str) -> configparser.ConfigParser:
    """Make a configuration; returns what luigi's parser reads in it."""
    folder.mkdir(exist_ok=True)
    run("-m", "pipeline", "init", *words, cwd=folder, **env)
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(folder / "luigi.cfg")
    return parser


def loaded(folder: Path, *expressions: str) -> list[str]:
    """What the real loader makes of it, as text."""
    shown = ", ".join(f"str(s.{expression})" for expression in expressions)
    program = (
        f"import pipeline, json; from pipeline.settings.load import load; s = load(); print(json.dumps([{shown}]))"
    )
    found: list[str] = json.loads(run("-c", program, cwd=folder).stdout)
    return found


def machine(folder: Path, **programs: str) -> dict[str, str]:
    """A machine on which these programs print these texts; the other ones are missing."""
    folder.mkdir()
    for name in ("sh", "cat", "env"):
        (folder / name).symlink_to(f"/bin/{name}" if Path(f"/bin/{name}").exists() else f"/usr/bin/{name}")
    for name, text in programs.items():
        (folder / f"{name}.txt").write_text(text)
        program = folder / name.replace("_", "-")
        program.write_text(f"#!{folder}/sh\nexec {folder}/cat {folder}/{name}.txt\n")
        program.chmod(0o755)
    return {"PATH": str(folder)}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return machine(tmp_path_factory.mktemp("bare") / "bin")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a space and a percent sign in its name."""
    path = tmp_path_factory.mktemp("text") / "my 100% text.txt"
    write_corpus(path, documents=600)
    return path


@pytest.mark.parametrize(
    "text", [pytest.param(False, id="without text", marks=pytest.mark.slow), pytest.param(True, id="with text")]
)
@pytest.mark.parametrize(
    "target",
    [pytest.param(target, marks=[pytest.mark.slow] * (target in ("gpu", "trn2", "trn3"))) for target in TARGETS],
)
def test_the_loader_takes_it_and_a_run_would_start(
    target: str, text: bool, bare: dict[str, str], corpus: Path, tmp_path: Path
) -> None:
    """On a machine where nothing of the target is found: the tutorials' instances are assumed, and it says so."""
    words = ["--for", target, *(["--text", str(corpus)] if text else [])]
    made = init(tmp_path / "run", *words, **bare)
    cluster = {"slurm": "slurm", "kubernetes": "kubernetes"}.get(target, "local")
    device = {"gpu": "cuda", "laptop": "cpu", "trn2": "neuron-native", "trn3": "neuron-native"}.get(target, "neuron")
    assert loaded(tmp_path / "run", "cluster.launcher", "cluster.device") == [cluster, device]
    if text:
        assert loaded(tmp_path / "run", "corpus.source", "dataset.phase1_url") == [f"'{corpus}'", ""]
    elif target == "gpu":
        (tmp_path / "run" / "enwiki-latest-pages-articles.xml.bz2").touch()
        (tmp_path / "run" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na")
    work = ("--Run-work-dir", "work") if target == "kubernetes" else ()
    why = run("-m", "pipeline", "why", "BertPhase2", *work, cwd=tmp_path / "run", status=1)
    first = "tokenize_corpus" if text or target in ("gpu", "laptop") else "download_dataset-phase1"
    assert f"{first} would run: it was never started" in why.stdout
    assert made.sections()


@pytest.mark.parametrize("target", TARGETS)
def test_it_is_short_and_every_setting_has_its_comment(target: str, bare: dict[str, str], tmp_path: Path) -> None:
    """It has only what differs from luigi.cfg, apart from what a person will most likely change."""
    made = init(tmp_path / "run", "--for", target, **bare)
    text = (tmp_path / "run" / "luigi.cfg").read_text()
    defaults = configparser.ConfigParser(interpolation=None)
    defaults.read(ROOT / "luigi.cfg")
    kept = {"work_dir", "source", "preset", "device", "nproc_per_node", "max_steps"}
    for section in made.sections():
        for key, value in made[section].items():
            assert key in defaults[section]
            assert key in kept or value != defaults[section][key], (section, key)
    lines = text.splitlines()
    uncommented = {line.split(" =")[0] for before, line in zip(lines, lines[1:], strict=False)
                   if " =" in line and line[0] not in "# " and not before.startswith("#")}  # fmt: skip
    assert uncommented <= {"attention_probs_dropout_prob", "phase2_url"}
    assert max(map(len, (line for line in lines if "://" not in line and "/luigi.cfg" not in line))) <= 120
    assert "tutorial:" not in text


@pytest.mark.parametrize(
    ("target", "config"),
    [
        ("trn1", "trn1-bert-large"),
        *(
            pytest.param(target, config, marks=pytest.mark.slow)
            for target, config in (
                ("gpu", "gpu-bert-large"),
                ("trn2", "trn2-bert-large"),
                ("trn3", "trn3-bert-large"),
                ("slurm", "slurm-two-nodes"),
            )
        ),
    ],
)
def test_its_values_are_those_of_the_projects_configuration(
    target: str, config: str, bare: dict[str, str], tmp_path: Path
) -> None:
    """Laid over luigi.cfg, both files give the same settings."""
    init(tmp_path / "run", "--for", target, **bare)
    program = (
        "import pipeline; from pipeline.settings.load import load; s = load()\n"
        "print({n: getattr(s, n).param_kwargs for n in vars(s)})"
    )
    ours = run("-c", program, cwd=tmp_path / "run").stdout
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "luigi.cfg").write_text((ROOT / "configs" / f"{config}.cfg").read_text())
    theirs = run("-c", program, cwd=tmp_path / "other").stdout
    assert ours == theirs


@pytest.mark.parametrize("claim", ["", "fsx"])
@pytest.mark.parametrize(("mounted", "expected"), [("run", "run"), ("", ""), (None, "/shared")])
def test_the_volume_is_where_the_folder_is_mounted_or_it_is_said_that_it_is_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claim: str, mounted: str | None, expected: str
) -> None:
    """The folder is the mount, or is in it, or there is none; with a stand-in for the mounts."""
    mounts = {Path("/"), *([] if mounted is None else [tmp_path / mounted])}
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) in mounts)
    nodes = Nodes(2, instance="trn1.32xlarge", claim=claim)
    seen = Surroundings(2, 1 << 30, None, None, "", None, nodes)
    draft, missing = draft_for("kubernetes", seen, None, tmp_path / "run")
    mount = tmp_path / expected  # "/shared" replaces it
    assert draft.text("kubernetes", "mount_path") == str(mount)
    assert Path(draft.text("run", "work_dir")).is_relative_to(mount)
    guessed = [*([] if claim else ["volume_claim"]), *(["mount_path"] if mounted is None else [])]
    lines = [line for line in missing if line.startswith(f"[kubernetes] {', '.join(guessed)}: a volume")]
    assert bool(lines) == bool(guessed)


def test_shards_are_as_many_as_the_text_in_a_packed_file_needs(tmp_path: Path) -> None:
    """A gzipped text of 200 MB: a shard for each 14 MB of what is in it, not of the file, which is a third of that."""
    for name, size, wanted in (
        ("a.txt", 200_000_000, 14),
        ("a.txt.gz", 67_000_000, 14),
        ("a.parquet", 125_000_000, 14),
    ):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
        seen = Surroundings(2, 1 << 30, None, None, "", None, None)
        draft, _ = draft_for("gpu", seen, Text.of(str(tmp_path / name)), tmp_path)
        assert draft.value("dataset", "shards") == wanted, name


@pytest.mark.slow
def test_what_is_seen_here_is_chosen(tmp_path: Path, bare: dict[str, str], corpus: Path) -> None:
    gpus = "NVIDIA A10G, 23028\n" * 4
    nodes = {"items": [{"metadata": {"labels": {}}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}}]}
    machines = {
        "laptop": bare,
        "gpu": machine(tmp_path / "a", nvidia_smi=gpus),
        "slurm": machine(tmp_path / "b", sinfo=SINFO.format(gres="(null)", features="(null)", limit="infinite")),
        "kubernetes": machine(tmp_path / "c", kubectl=json.dumps(nodes)),
        # The firmware tells which of the two it is; here the firmware is this machine's.
        "trn[12]": machine(tmp_path / "d", neuron_ls=json.dumps([{"neuron_device": 0, "nc_count": 2}] * 16)),
    }
    for target, env in machines.items():
        (tmp_path / target).mkdir()
        said = run("-m", "pipeline", "init", "--text", str(corpus), cwd=tmp_path / target, **env).stdout
        assert re.match(rf"luigi\.cfg: for {target}, ", said), said


def test_workers_and_batches_are_those_of_the_gpus_here(tmp_path: Path) -> None:
    """Three GPUs of 23 GB: micro-batches a quarter of the size, and global batches that can be divided by three."""
    made = init(tmp_path / "run", **machine(tmp_path / "bin", nvidia_smi="NVIDIA A10G, 23028\n" * 3))
    assert made["cluster"]["nproc_per_node"] == "3"
    for phase, wanted in (("phase1", 65536), ("phase2", 16384)):
        whole, micro = int(made[phase]["global_batch_size"]), int(made[phase]["micro_batch_size"])
        assert whole % (3 * micro) == 0
        assert abs(whole - wanted) < 3 * micro
    assert (made["phase1"]["micro_batch_size"], made["phase2"]["micro_batch_size"]) == ("64", "32")
    said = (tmp_path / "run" / "luigi.cfg").read_text()
    assert "64 rows × 341 micro-steps × 3 workers (65536 cannot be divided among 3)" in said
    assert loaded(tmp_path / "run", "cluster.device") == ["cuda"]


def test_workers_are_the_neuron_cores_here(tmp_path: Path) -> None:
    """A trn1.2xlarge has one chip; the global batch stays the same."""
    env = hardware(tmp_path, cores=[2])
    made = init(tmp_path / "run", "--for", "trn1", PATH=env["PATH"])
    assert made["cluster"]["nproc_per_node"] == "2"
    assert made["phase1"]["global_batch_size"] == "16384"
    assert "16 rows × 512 micro-steps × 2 workers" in (tmp_path / "run" / "luigi.cfg").read_text()
    assert loaded(tmp_path / "run", "cluster.workers") == ["2"]


@pytest.mark.parametrize(
    ("gres", "features", "limit", "expected"),
    [
        ("gpu:a100:8(S:0-1)", "(null)", "infinite", ("cuda", "8", "24:00:00")),
        ("(null)", "dynamic,trn1.32xlarge,trn", "4:00:00", ("neuron", "32", "4:00:00")),
        ("(null)", "static,trn2.48xlarge", "2-00:00:00", ("neuron-native", "64", "24:00:00")),
        ("(null)", "trn3.48xlarge", "infinite", ("neuron-native", "64", "24:00:00")),
        ("(null)", "(null)", "30:00", ("cpu", "1", "0:30:00")),
    ],
)
def test_jobs_of_slurm_are_for_the_nodes_that_it_has(
    tmp_path: Path, gres: str, features: str, limit: str, expected: tuple[str, str, str]
) -> None:
    """The nodes of the default partition. `sbatch_lines` ask for all GPUs of a node."""
    env = machine(tmp_path / "bin", sinfo=SINFO.format(gres=gres, features=features, limit=limit))
    made = init(tmp_path / "run", **env)
    wanted = ("cluster.device", "cluster.nproc_per_node", "slurm.time_limit", "slurm.partition", "cluster.nnodes")
    assert loaded(tmp_path / "run", *wanted) == [*expected, "debug", "2"]
    assert ("--gres=gpu:8" in made["slurm"].get("sbatch_lines", "")) == (expected[0] == "cuda")


def test_pods_request_what_the_nodes_can_give(tmp_path: Path) -> None:
    """`python -m pipeline manifest` makes the Job from it."""
    node = {
        "metadata": {"labels": {"node.kubernetes.io/instance-type": "trn1.32xlarge"}},
        "status": {"allocatable": {"aws.amazon.com/neuron": "16", "vpc.amazonaws.com/efa": "8", "cpu": "128"}},
    }
    plain = {"metadata": {"labels": {}}, "status": {"allocatable": {"cpu": "8"}}}
    claim = {"metadata": {"name": "fsx"}, "spec": {"accessModes": ["ReadWriteMany"]}}
    folder = tmp_path / "bin"
    env = machine(folder, nodes=json.dumps({"items": [plain, plain, plain, node, node]}),
                  claims=json.dumps({"items": [claim]}))  # fmt: skip
    (folder / "kubectl").write_text(
        f'#!{folder}/sh\nif [ "$2" = nodes ]; then exec {folder}/cat {folder}/nodes.txt; fi\n'
        f"exec {folder}/cat {folder}/claims.txt\n"
    )
    (folder / "kubectl").chmod(0o755)
    made = init(tmp_path / "run", **env)
    assert made["kubernetes"]["volume_claim"] == "fsx"
    assert made["kubernetes"]["pod_resources"] == "aws.amazon.com/neuron=16 vpc.amazonaws.com/efa=8"
    done = run("-m", "pipeline", "manifest", cwd=tmp_path / "run")
    (job,) = (document for document in yaml.safe_load_all(done.stdout) if document["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert job["spec"]["parallelism"] == 2
    assert container["resources"]["limits"]["aws.amazon.com/neuron"] == "16"
    assert container["image"] == made["kubernetes"]["image"]


@pytest.mark.slow
def test_a_laptop_trains_with_it(tmp_path: Path, bare: dict[str, str], corpus: Path) -> None:
    """The whole chain on the text given, with the file as it is; options make model and training smaller."""
    init(tmp_path / "run", "--text", str(corpus), **bare)
    few = [word for phase in (1, 2) for word in (f"--Phase{phase}-max-steps", "2", f"--Phase{phase}-warmup-steps", "1")]
    smaller = ("--Phase2-global-batch-size", "8", "--Corpus-vocab-size", "300", "--Run-processes", "1")
    done = run("-m", "luigi", "--module", "pipeline", "BertPhase2", *few, *smaller, cwd=tmp_path / "run")
    assert "BERT is pretrained." in done.stdout + done.stderr
    assert (tmp_path / "run" / "work" / "report.html").exists()


def test_a_file_that_is_there_is_replaced_only_when_told(tmp_path: Path, bare: dict[str, str]) -> None:
    (tmp_path / "luigi.cfg").write_text("[phase1]\nlr = mine\n")  # it does not even have to be valid
    done = run("-m", "pipeline", "init", cwd=tmp_path, status=35, **bare)
    assert_one_line_error(done, "luigi.cfg already exists", "--force", status=35)
    assert "mine" in (tmp_path / "luigi.cfg").read_text()
    run("-m", "pipeline", "init", "--force", cwd=tmp_path, **bare)
    assert "mine" not in (tmp_path / "luigi.cfg").read_text()


def test_the_projects_own_file_is_never_replaced(tmp_path: Path, bare: dict[str, str]) -> None:
    """It has the defaults. Here there is a link to it, which would be replaced instead."""
    (tmp_path / "luigi.cfg").symlink_to(ROOT / "luigi.cfg")
    for words in ((), ("--force",)):
        done = run("-m", "pipeline", "init", *words, cwd=tmp_path, status=35, **bare)
        assert_one_line_error(done, "luigi.cfg is the project's own", "python -m pipeline init FOLDER", status=35)
        assert (tmp_path / "luigi.cfg").is_symlink()


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (("--for", "abc"), ["--for is abc", "allowed: laptop, gpu, trn1, trn2, trn3, slurm, kubernetes"]),
        (("--for", "slrum"), ["--for is slrum; did you mean slurm?"]),
        (("--text", "nothing.txt"), ["nothing.txt matches no file"]),
        (("file",), ["file is a file; give a folder"]),
    ],
)
def test_what_cannot_be_made_is_one_line(
    tmp_path: Path, bare: dict[str, str], words: tuple[str, ...], fragments: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    done = run("-m", "pipeline", "init", *words, cwd=tmp_path, status=35, **bare)
    assert_one_line_error(done, *fragments, status=35)
    assert not (tmp_path / "luigi.cfg").exists()


def test_every_name_has_its_choice() -> None:
    assert set(TARGETS) == set(CHOICES)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, bare: dict[str, str]) -> None:
    done = run("-m", "pipeline", "init", "/proc/nope/x", cwd=tmp_path, status=35, **bare)
    assert_one_line_error(done, "cannot write /proc/nope/x: No such file or directory", status=35)


def test_another_folder_is_made(tmp_path: Path, bare: dict[str, str]) -> None:
    done = run("-m", "pipeline", "init", "new/folder", cwd=tmp_path, **bare)
    assert (tmp_path / "new" / "folder" / "luigi.cfg").exists()
    assert "cd new/folder && luigi --module pipeline BertPhase2" in done.stdout
    done = run("-m", "pipeline", "init", "my run %20", cwd=tmp_path, **bare)
    assert "cd 'my run %20' && luigi --module pipeline BertPhase2" in done.stdout
