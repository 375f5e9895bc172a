"""luigi.cfg: every key is known, typed and in range; anything else is a one-line error before anything starts."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import luigi
import pytest

from common.errors import UserError
from common.options import fields_of
from pipeline.settings import sections
from pipeline.settings.cluster import Cluster
from pipeline.settings.config_file import entries
from pipeline.settings.load import overlaid
from stages.evaluate import EvaluateOptions
from stages.mnist import MnistOptions
from stages.shard import ShardOptions
from stages.text.corpus import TokenizeOptions
from stages.transfer.urls import Transport
from tests.helpers.support import ROOT, assert_one_line_error, command
from trainer.config import TrainConfig
from trainer.devices.select import select
from trainer.models.config import ModelConfig
from trainer.options import device_options
from trainer.parallel.mesh import Mesh
from trainer.workloads.base import Workload

CONFIGS = sorted((ROOT / "configs").glob("*.cfg"))
LUIGI = ("-m", "luigi", "--module", "pipeline")


def refused(tmp_path: Path, text: str, *fragments: str) -> None:
    """These lines, laid over the defaults, end luigi with one line and `scheduling_error`, and start nothing."""
    config = tmp_path / "test.cfg"
    config.write_text(f"[run]\nwork_dir = {tmp_path / 'work'}\n{text}")
    done = command(*LUIGI, "BertPhase2", env={"LUIGI_CONFIG_PATH": str(config)})
    assert_one_line_error(done, *fragments, status=35)
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("[phase3]\nlr = 1", ["[phase3] is not a section", "did you mean phase"]),
        ("[Phase1]\nlr = 1", ["[Phase1] is not a section", "did you mean phase1"]),
        ("[scheduler]\nretry_dely = 5", ["[scheduler] retry_dely is not a setting; did you mean retry_delay?"]),
        ("[phase1]\nlearning_rate = 1", ["[phase1] learning_rate is not a setting", "allowed: "]),
        ("[phase1]\nmax_step = 1", ["did you mean max_steps?"]),
        ("[phase1]\nlr = fast", ["[phase1] lr = 'fast'", "a number, 0 or more"]),
        ("[phase2]\nmax_steps = 0", ["[phase2] max_steps = 0", "1 or more"]),
        ("[phase2]\nmax_steps = 1.5", ["[phase2] max_steps = '1.5'", "a whole number"]),
        (
            "[phase1]\nbudget = 1.5h",
            ["[phase1] budget = '1.5h'", "allowed: empty or a time such as 90s, 20m, 8h or 1d"],
        ),
        ("[phase2]\nbudget = 20", ["[phase2] budget = '20'", "empty or a time"]),
        ("[phase1]\nlr = inf", ["[phase1] lr = inf"]),
        ("[phase1]\nlr = nan", ["[phase1] lr = nan"]),
        ("[corpus]\nlower_case = perhaps", ["lower_case = perhaps", "true, false"]),
        ("[corpus]\nheld_out = 0.9", ["held_out = 0.9", "from 0 to 0.5"]),
        ("[model]\npreset = huge", ["preset = huge", "tiny, mini"]),
        ("[model]\nnum_attention_heads = 3", ["hidden_size 128 / num_attention_heads 3"]),
        ("[cluster]\ndevice = tpu", ["tpu", "cpu, cuda"]),
        ("[cluster]\nbatches_per_execution = 3", ["2 micro-steps", "batches_per_execution = 3", "change one"]),
        ("[phase1]\noptimizer = Adam", ["optimizer = Adam is not allowed", "AdamW_FP32ParamsCopy, LAMB"]),
        (
            "[phase2]\noptimizer = AdamW_FP32ParamsCopy\n[precision]\nmode = autocast",
            ["AdamW_FP32ParamsCopy", "which is not precision autocast", "auto, bf16-master"],
        ),
        ("[phase1]\nglobal_batch_size = 65", ["65 = 16 × ? × 1"]),
        ("[phase2]\nseq_len = 1024", ["seq_len = 1024", "max_position_embeddings = 512"]),
        ("[phase1]\nwarmup_steps = 2001", ["warmup_steps = 2001", "max_steps = 2000"]),
        (
            "[dataset]\nmasking = static",
            ["[phase1] final_masked_lm_prob = 0.15 does not go with [dataset] masking = static", "leave it empty"],
        ),
        (
            "[dataset]\nmasking = static\n[phase1]\nfinal_masked_lm_prob =",
            ["masked_lm_prob = 0.3 of seq_len = 128 are 38 masked positions, more than max_pred_len = 20"],
        ),
        (
            "[dataset]\nnext_sentence = false\ndupe_factor = 2",
            ["dupe_factor = 2 does not go with next_sentence = false and masking = dynamic", "set it to 1"],
        ),
        ("[dataset]\nnext_sentence = no thanks", ["next_sentence = no thanks", "true, false"]),
        ("[phase1]\nmax_pred_len = 129", ["max_pred_len = 129", "seq_len = 128"]),
        ("[dataset]\nphase1_sha256 = 12", ["phase1_sha256 = 12", "empty or 64 hexadecimal digits"]),
        ("[dataset]\nconnections = 65", ["connections = 65", "from 1 to 64"]),
        (
            "[dataset]\nphase1_url = s3://bucket\nphase2_url = s3://bucket/2.tar",
            ["s3://bucket is not an object in S3; write s3://bucket/key"],
        ),
        ("[dataset]\nphase1_url = s3://b/1.tar", ["phase1_url is set and phase2_url is empty", "two vocabularies"]),
        ("[dataset]\nphase2_url = s3://b/2.tar", ["phase2_url is set and phase1_url is empty", "both addresses"]),
        ("[corpus]\nsource = /no/such/*.txt", ["/no/such/*.txt matches no file"]),
        ("[cluster]\nlauncher = pbs", ["launcher = pbs", "local, slurm, kubernetes"]),
        ("[cluster]\nnnodes = 2", ["nnodes = 2 with launcher = local needs master_addr"]),
        ("[cluster]\nnnodes = 2\nnode_rank = 2\nmaster_addr = a", ["node_rank = 2", "allowed: 0 to 1"]),
        ("[cluster]\nlauncher = slurm\nmaster_addr = a", ["launcher = slurm finds them itself"]),
        # 32 sequences are not a whole number of micro-batches of 16 for the 6 workers of 3 nodes.
        (
            "[cluster]\nlauncher = slurm\nnnodes = 3\nnproc_per_node = 2",
            ["[phase1]", "32 = 16 × ? × 6 (3 nodes × 2 / 1)", "change one of the three"],
        ),
        ("[cluster]\nlauncher = slurm\n[slurm]\ntime_limit = soon", ["time_limit = soon", "is not a time"]),
        (
            "[cluster]\nlauncher = slurm\n[slurm]\ntime_limit = 3",
            ["time_limit = 3 (180 s)", "signal_s = 120", "raise the one"],
        ),
        (
            "[cluster]\nlauncher = slurm\n[slurm]\nsbatch_lines = --mem=0 --nodes=4",
            ["sbatch_lines: --mem=0 --nodes=4 is not allowed"],
        ),
        (
            "[cluster]\nlauncher = slurm\n[slurm]\nsbatch_lines = --mem=0 -pother",
            ["sbatch_lines: --mem=0 -pother is not allowed"],
        ),
        (
            '[cluster]\nlauncher = slurm\n[slurm]\nsbatch_lines = --comment="two words',
            ['sbatch_lines: --comment="two words is not allowed: no closing quotation'],
        ),
        (
            "[cluster]\nlauncher = slurm\n[slurm]\nsbatch_lines = #SBATCH --exclusive",
            ["sbatch_lines: #SBATCH --exclusive is not allowed; give options of sbatch without #SBATCH"],
        ),
        (
            "[cluster]\nlauncher = slurm\n[slurm]\nsbatch_lines = --exclusive\n    #SBATCH --gres=gpu:8\n    --mem=0",
            ["[slurm] sbatch_lines: line", "is a comment, for its #; leave out #SBATCH"],
        ),
        ("[cluster]\nlauncher = kubernetes", ["[kubernetes] image is empty"]),
        ("[corpus]\nvocab_file = /no/vocab.txt", ["/no/vocab.txt"]),
        (
            "[trackers]\nnames = board",
            ["[trackers] names = board: board is not a tracker", "did you mean tensorboard?"],
        ),
        ("[trackers]\nwandb_mode = away", ["[trackers] wandb_mode = away", "online, offline"]),
        (
            "[trackers]\nnames = wandb\nwait_s = 600",
            ["[trackers] wait_s = 600 is no less than [cluster] hang_timeout_s or", "allowed: below 600"],
        ),
        ("[trackers]\nwait_s = -1", ["[trackers] wait_s = -1", "0 or more"]),
        (
            "[cluster]\nlauncher = slurm\n[trackers]\nnames = mlflow\nmlflow_uri = https://me:pass@host/",
            ["[trackers] mlflow_uri = https://host/ has a login", "MLFLOW_TRACKING_PASSWORD"],
        ),
    ],
)
def test_what_cannot_work_is_one_line(tmp_path: Path, text: str, fragments: list[str]) -> None:
    refused(tmp_path, text, *fragments)


#: Options that no training can have together.
IMPOSSIBLE: list[dict[str, Any]] = [
    *({"data_parallel": "ddp", name: True} for name in ("compile", "shard_optimizer", "grad_reduce_in_bf16")),
    {"data_parallel": "ddp", "tensor_parallel_size": 2},
    {"data_parallel": "ddp", "device": "xla"},
    *({"device": device, name: True} for device in ("xla", "neuron-xla") for name in ("compile", "shard_optimizer")),
    {"device": "neuron-native", "compile": True, "tensor_parallel_size": 2},
    {"allow_fallbacks": "aten::gelu,,aten::sort"},
]


@pytest.mark.parametrize("given", IMPOSSIBLE, ids=lambda given: "-".join(map(str, given.values())))
def test_what_every_training_would_refuse_is_refused_before_anything_is_made(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    """By the trainer on the machine, and by luigi at once; each names every option as it was given."""
    size = given.get("tensor_parallel_size", 1)
    workload, mesh = cast("Workload", SimpleNamespace(threads=None)), Mesh(world_size=size, tensor_parallel_size=size)

    def start() -> None:
        config = TrainConfig(**given)
        select(config.device, mesh, device_options(config, workload, mesh))

    with pytest.raises(UserError, match="".join(rf"(?=.*--{name}\b)" for name in given)):
        start()
    sections_of = {name: "precision" if name == "grad_reduce_in_bf16" else "cluster" for name in given}
    text = f"[cluster]\nnproc_per_node = {size}\n"
    for name, value in given.items():
        text += f"{'[precision]' if name == 'grad_reduce_in_bf16' else ''}\n{name} = {str(value).lower()}\n"
    refused(tmp_path, text, *(f"[{section}] {name} = " for name, section in sections_of.items()))


def test_what_only_the_machine_can_say_is_left_to_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which device auto and neuron are, and, without XLA, what takes its place."""
    for device in ("auto", "neuron"):
        settings = overlaid({"cluster": {"device": device, "compile": "true", "shard_optimizer": "true"}})
        assert (settings.cluster.device, settings.cluster.compile) == (device, True)
    monkeypatch.setenv("DISABLE_XLA", "1")
    assert overlaid({"cluster": {"device": "xla", "compile": "true"}}).cluster.compile


def pods(device: str, resources: str, *, nodes: int = 1) -> str:
    """Settings for trn1.32xlarge nodes of Kubernetes with these resources, 32 workers on each."""
    return (
        f"[cluster]\nlauncher = kubernetes\ndevice = {device}\nnnodes = {nodes}\nnproc_per_node = 32\n[kubernetes]\n"
        f"image = i\nvolume_claim = v\nmount_path = /\npod_resources = {resources}\n"
        f"node_selector = node.kubernetes.io/instance-type=trn1.32xlarge\n"
        f"[phase1]\nglobal_batch_size = 1024\n[phase2]\nglobal_batch_size = 1024"
    )


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        (
            pods("neuron", "aws.amazon.com/neurondevice=16"),
            ["neurondevice is not what AWS's plugins register", "allowed"],
        ),
        (pods("cpu", "vpc.amazonaws.com/EFA=8"), ["vpc.amazonaws.com/EFA is not", "vpc.amazonaws.com/efa"]),
        (pods("cpu", "aws.amazon.com/neuron=16x"), ["aws.amazon.com/neuron=16x is not allowed", "a whole number"]),
        (pods("neuron", "aws.amazon.com/neuron=16 aws.amazon.com/neuroncore=32"), ["exclude each other", "keep one"]),
        (pods("neuron", ""), ["pod_resources = (empty) has at most 0 NeuronCores", "nproc_per_node = 32", "request"]),
        (pods("neuron-xla", "aws.amazon.com/neuron=15"), ["has at most 30 NeuronCores", "nproc_per_node = 32"]),
        (pods("neuron", "aws.amazon.com/neuroncore=31"), ["has at most 31 NeuronCores", "nproc_per_node = 32"]),
        (pods("neuron", "aws.amazon.com/neuron=16", nodes=2), ["has no vpc.amazonaws.com/efa", "nnodes = 2", "add"]),
    ],
)
def test_pods_request_what_trainium_needs(tmp_path: Path, text: str, fragments: list[str]) -> None:
    refused(tmp_path, text, *fragments)


def test_a_config_file_that_is_not_there_is_refused() -> None:
    done = command(*LUIGI, "BertPhase2", env={"LUIGI_CONFIG_PATH": "/no/such.cfg"})
    assert_one_line_error(done, "LUIGI_CONFIG_PATH = /no/such.cfg", status=35)


def test_the_defaults_hold_in_any_directory(tmp_path: Path) -> None:
    """`--Phase1-lr` on the command line wins over them."""
    program = (
        "import sys; from luigi.cmdline_parser import CmdlineParser\n"
        "with CmdlineParser.global_instance(['--module', 'pipeline', 'BertPhase2', '--Phase1-lr', '0.25']):\n"
        "    from pipeline.settings.load import load; import luigi.configuration\n"
        "    s = load(); print(s.phase1.lr, s.phase2.seq_len, s.run.work_dir, s.model.hidden_size)\n"
        "    print(luigi.configuration.get_config().getboolean('core', 'local_scheduler'))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0.25", "512", "work", "None", "True"]


def test_a_default_that_is_missing_is_one_line() -> None:
    """As when another file has taken the place of the project's luigi.cfg."""
    program = (
        "import sys, pipeline; from luigi.configuration import get_config; from pipeline.__main__ import main\n"
        "get_config().remove_option('phase1', 'lr'); sys.exit(main(['status']))"
    )
    assert_one_line_error(command("-c", program), "[phase1] lr is not set", f"{ROOT / 'luigi.cfg'}", status=35)


def test_every_setting_is_in_luigi_cfg_with_a_comment() -> None:
    from pipeline.settings import sections

    text = (ROOT / "luigi.cfg").read_text()
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(text)
    for section in sections.SECTIONS:
        names = {name for name, _ in section.get_params()}
        assert set(parser[sections.section_name(section)]) == names, sections.section_name(section)
    documented, lines = set(), text.splitlines()
    for before, line in zip(lines, lines[1:], strict=False):
        if " =" in line and not line.startswith("#") and before.startswith("#"):
            documented.add(line.split(" =")[0])
    keys = {key for section in sections.SECTIONS for key in parser[sections.section_name(section)]}
    headers = {entry.section: entry.comment for entry in entries(text) if not entry.key}
    assert [name for name, comment in headers.items() if any("MnistMlp" in line for line in comment)] == ["mnist"]
    # A key of both phases is explained in the first; two probabilities share a line.
    assert keys - documented <= {"attention_probs_dropout_prob", "phase2_url", "hidden_size"} | {
        "num_hidden_layers", "num_attention_heads", "intermediate_size"
    }  # fmt: skip


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_has_only_known_settings(path: Path) -> None:
    program = "import pipeline; from pipeline.settings.load import load; load()"
    done = command("-c", program, env={"LUIGI_CONFIG_PATH": str(path)})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", [path for path in CONFIGS if "trn" in path.stem], ids=lambda path: path.stem)
def test_the_aws_configs_say_what_training_begins_with_and_minimises(path: Path) -> None:
    """Otherwise the values in luigi.cfg, which are for small models, would apply."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(path)
    assert [parser["phase1"][key] for key in ("word_embeddings", "initial_attention")] == ["random", "random"]
    assert parser["phase2"]["new_positions"] == "initial"
    assert [parser[phase]["next_sentence_weight"] for phase in ("phase1", "phase2")] == ["1", "1"]


@pytest.mark.parametrize("name", ["trn1-bert-large", "trn1-wikipedia"])
def test_the_trainium_configs_have_the_tutorials_numbers(name: str) -> None:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "configs" / f"{name}.cfg")
    expected = {
        "phase1": {"global_batch_size": 16384, "lr": 4e-4, "warmup_steps": 2000, "max_steps": 28125, "seq_len": 128,
                   "max_pred_len": 20, "micro_batch_size": 16},
        "phase2": {"global_batch_size": 32768, "lr": 2.8e-4, "warmup_steps": 781, "max_steps": 1563, "seq_len": 512,
                   "max_pred_len": 80, "micro_batch_size": 2},
    }  # fmt: skip
    for section, values in expected.items():
        assert {key: float(parser[section][key]) for key in values} == values
    assert {key: parser["model"][key] for key in ("hidden_dropout_prob", "attention_probs_dropout_prob")} == {
        "hidden_dropout_prob": "0.1", "attention_probs_dropout_prob": "0.1",
    }  # fmt: skip
    assert parser["model"]["preset"] == "large"
    assert parser["cluster"]["nproc_per_node"] == "32"
    assert parser["precision"]["mode"] == "bf16-sr"
    assert parser["cluster"]["device"] == "neuron"


def test_the_fast_trainium_config_changes_the_recipe_and_keeps_the_layout() -> None:
    """Batches, workers, precision and model of the tutorial; Muon, dynamic masks of 30 to 15 %, no dropout."""
    fast, tutorial = (configparser.ConfigParser(interpolation=None) for _ in range(2))
    fast.read(ROOT / "configs" / "trn1-bert-large-fast.cfg")
    tutorial.read(ROOT / "configs" / "trn1-bert-large.cfg")
    for phase in ("phase1", "phase2"):
        for key in ("seq_len", "max_pred_len", "micro_batch_size"):
            assert fast[phase][key] == tutorial[phase][key], (phase, key)
        assert fast[phase]["optimizer"] == "Muon"
    assert fast["phase1"]["global_batch_size"] == tutorial["phase1"]["global_batch_size"]
    assert 2 * int(fast["phase2"]["global_batch_size"]) == int(tutorial["phase2"]["global_batch_size"])  # packed
    for section in ("cluster", "precision"):
        assert dict(fast[section]) == dict(tutorial[section])
    assert (fast["dataset"]["masking"], fast["phase1"]["masked_lm_prob"], fast["phase1"]["final_masked_lm_prob"]) == (
        "dynamic", "0.3", "0.15",
    )  # fmt: skip
    assert "NOT RUN ON TRAINIUM" in (ROOT / "configs" / "trn1-bert-large-fast.cfg").read_text().split("[corpus]")[0]


NATIVE = {
    # name: (machines, tensor-parallel size); each has 64 logical cores.
    "trn2-bert-large": (1, 1),
    "trn2-bert-large-tp4": (1, 4),
    "trn3-bert-large": (1, 1),
    "trn3-bert-large-tp4": (1, 4),
    "slurm-trn2-two-nodes": (2, 1),
}


@pytest.mark.parametrize("name", NATIVE)
def test_the_native_trainium_configs_train_as_the_tutorial_with_the_workers_of_their_instance(name: str) -> None:
    native, tutorial = (configparser.ConfigParser(interpolation=None) for _ in range(2))
    native.read(ROOT / "configs" / f"{name}.cfg")
    tutorial.read(ROOT / "configs" / "trn1-bert-large.cfg")
    assert dict(native["model"]) == dict(tutorial["model"])
    for phase in ("phase1", "phase2"):
        ours, theirs = dict(native[phase]), dict(tutorial[phase])
        for values in (ours, theirs):
            del values["optimizer"], values["micro_batch_size"]
        assert ours == theirs
        assert native[phase]["optimizer"] == "AdamW"
    cluster = native["cluster"]
    assert (cluster["device"], native["precision"]["mode"]) == ("neuron-native", "autocast")
    nodes, size = NATIVE[name]
    layout = [int(cluster.get(key, "1")) for key in ("nnodes", "nproc_per_node", "tensor_parallel_size")]
    assert layout == [nodes, 64, size]
    assert cluster["compile"] == ("true" if size == 1 else "false")  # a split model is not one graph
    header = (ROOT / "configs" / f"{name}.cfg").read_text().split("\n\n")[0]
    assert "NOT RUN ON TRAINIUM" in header
    assert re.search(r"trn[23]", header)


@pytest.mark.parametrize(
    "path", [path for path in CONFIGS if re.search("trn|slurm", path.stem)], ids=lambda path: path.stem
)
def test_the_batches_of_a_config_are_what_its_comments_multiply(path: Path) -> None:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(path)
    cluster = parser["cluster"]
    copies = (
        int(cluster["nproc_per_node"])
        * int(cluster.get("nnodes", "1"))
        // int(cluster.get("tensor_parallel_size", "1"))
    )
    said = re.findall(r"# (\d+) (?:sequences|rows) × (\d+) micro-steps × (\d+) (?:workers|copies)", path.read_text())
    for phase, numbers in zip(("phase1", "phase2"), said, strict=True):
        micro, usteps, workers = map(int, numbers)
        assert (micro, workers) == (int(parser[phase]["micro_batch_size"]), copies)
        assert micro * usteps * workers == int(parser[phase]["global_batch_size"])


def test_the_wikipedia_config_makes_the_tutorials_data_from_a_dump() -> None:
    """NVIDIA's script: 1,024 shards, 5 duplicates, 15 % masked; both phases from the corpus, with BERT's vocabulary."""
    program = (
        "from pipeline.tasks import dataset\n"
        "from pipeline.settings.load import load\n"
        "s = load()\n"
        "print([type(dataset.dataset_of(dataset.TokenizeCorpus(), phase)).__name__ for phase in (1, 2)],\n"
        "      s.dataset.shards, s.dataset.dupe_factor,\n"
        "      s.dataset.masking, s.phase1.masked_lm_prob, s.corpus.source, s.corpus.vocab_file,\n"
        "      s.corpus.lower_case, s.phase2.pack)"
    )
    done = command("-c", program, env={"LUIGI_CONFIG_PATH": "configs/trn1-wikipedia.cfg"})
    assert done.stdout.strip() == (
        "['ShardDataset', 'ShardDataset'] 1024 5 static 0.15 enwiki-latest-pages-articles.xml.bz2 vocab.txt True False"
    ), done.stderr


@pytest.mark.parametrize(
    ("section", "options"),
    [
        *((section, TrainConfig) for section in (sections.Run, sections.Phase1, sections.Phase2, Cluster)),
        *((section, ShardOptions) for section in (sections.Phase1, sections.Phase2, sections.Dataset)),
        *((sections.Corpus, TokenizeOptions), (sections.Dataset, Transport)),
        *((sections.Evaluation, EvaluateOptions), (sections.Mnist, MnistOptions)),
    ],
)
def test_a_setting_never_allows_what_its_option_refuses(section: type[luigi.Config], options: type) -> None:
    """A value that only the stage refuses would end the run hours later."""
    settings = dict(section.get_params())
    shared = {name: about for name, (_, about) in fields_of(options).items() if name in settings}
    assert shared
    for name, about in shared.items():
        beyond = ["no such choice"] if about.choices else []
        beyond += [str(about.least - 1)] if about.least is not None else []
        beyond += [str(most + 1) for most in (about.most, about.below) if most is not None]
        for text in beyond:
            with pytest.raises(UserError, match="is not allowed"):
                settings[name].parse(text)


@pytest.mark.parametrize("name", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
def test_a_dropout_probability_never_is_one_that_the_model_refuses(name: str) -> None:
    setting = dict(sections.Model.get_params())[name]
    with pytest.raises(UserError, match=f"{name} = 1 is not allowed; allowed: a number from 0 to 0.999"):
        setting.parse("1")
    for text in ("0", "0.999"):
        assert getattr(ModelConfig.preset("tiny", **{name: setting.parse(text)}), name) == float(text)
    with pytest.raises(UserError, match="allowed: 0 ≤ p < 1"):
        ModelConfig.preset("tiny", **{name: 1.0})
