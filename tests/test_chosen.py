"""The model of a job: folders, sizes, and a table for the tokenizer."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from components.commands.start import check_layout_and_weights
from components.config import ConfigError, JobConfig, absolute_tables, from_json, load_config, to_dict, to_json
from components.data import with_rows
from components.data.tokenizer import load_tokenizer
from components.state.card import recipe
from components.state.folder import chosen_model
from models import MODELS, meta_model, sizes
from parallelize.rules import check_model
from parallelize.rules.chosen import resolved
from tests.harness import observe
from tests.jobs import job
from tests.small import SMALL

QWEN3 = MODELS["qwen3"][1]["tiny"]


def checked(*words: str) -> JobConfig:
    config = resolved(with_rows(load_config([*words])))
    check_model(config)
    return config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder without weights, whose path has a space."""
    path = tmp_path / "my model"
    path.mkdir()
    with_class = MODELS["qwen3"][0]
    (path / "config.json").write_text(json.dumps(with_class(QWEN3).hf_config()))
    return path


def test_a_folder_says_the_family_and_all_sizes(folder: Path) -> None:
    config = checked("--model.flavor", str(folder), "--model.sizes.n_layers", "3")
    model = from_json(to_json(config)).model
    (folder / "config.json").unlink()
    assert (model.name, model.hf_assets_path) == ("qwen3", str(folder))
    assert sizes(model).n_layers == 3
    for of_run in (sizes(model), sizes(chosen_model(to_dict(config))), meta_model(model).config):
        assert of_run == sizes(model), "without reading the folder again"


def test_the_card_of_an_export_names_the_folder(folder: Path) -> None:
    text = recipe(absolute_tables(checked("--model.flavor", str(folder))))
    model = tomllib.loads(text)["model"]
    assert (model["flavor"], "sizes" in model) == (f"./{folder.name}", False)


def test_a_folder_of_the_command_line_replaces_the_model_of_the_job_file(folder: Path, tmp_path: Path) -> None:
    path = job(tmp_path, '[model]\nname = "llama"\nflavor = "8B"\nhf_assets_path = "x"\n')
    own = ("--job.config_file", str(path), "--model.flavor", str(folder))
    assert (checked(*own).model.name, checked(*own).model.hf_assets_path) == ("qwen3", str(folder))
    assert checked(*own, "--model.hf_assets_path", "assets").model.hf_assets_path == "assets"
    path = job(tmp_path, f'[model]\nname = "llama"\nflavor = "{folder}"\n')
    with pytest.raises(ConfigError, match=r'job.toml:2: model.name = "llama": .*config.json is of qwen3; leave'):
        checked("--job.config_file", str(path))


def test_a_scaling_of_the_job_is_refused_only_where_it_is_exported(tmp_path: Path) -> None:
    """config.json of Phi-3 has no place for it."""
    model = MODELS["phi3"][0](replace(MODELS["phi3"][1]["tiny"], rope_scaling=None))
    (tmp_path / "config.json").write_text(json.dumps(model.hf_config()))
    rope = ("--model.rope_scaling.rope_type", "linear", "--model.rope_scaling.factor", "2.0")
    assert sizes(checked("--model.flavor", str(tmp_path), *rope).model).rope_scaling.factor == 2.0


def test_its_weights_are_those_of_the_folder_unless_others_are_named(folder: Path) -> None:
    words = ("--model.flavor", str(folder), "--checkpoint.initial_load_in_hf")
    assert load_config([*words]).checkpoint.initial_load_path == str(folder)
    assert load_config([*words, "--checkpoint.initial_load_path", "x"]).checkpoint.initial_load_path == "x"
    assert load_config(["--model.flavor", str(folder)]).checkpoint.initial_load_path is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "stablelm"}, r"model_type = stablelm: not one of .*; nearest are .*by their fields"),
        ({"model_type": ["a"]}, r"model_type = \['a'\]: not one of"),
        ({"model_type": "qwen33"}, r".*; nearest are qwen3, "),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, r"architectures = \['Qwen3MoeForCausalLM'\]: not a class of"),
        ({"use_sliding_window": True}, r"use_sliding_window = True: not available$"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0.5: not available; families .*: glm4_moe$"),
        ({"model_type": "qwen2_vl"}, r"model_type = qwen2_vl: not one of .*; nearest are qwen2, "),
        ({"hidden_size": "64"}, r"hidden_size = 64: not available"),
        ({"num_key_value_heads": 3}, r"n_heads = 4, n_kv_heads = 3: groups of heads must be equal"),
        ({"num_hidden_layers": 0}, r"n_layers = 0: a number above 0"),
        ({"rope_scaling": [1]}, r"rope_scaling = \[1\]: not available"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, r"factor = 0.0: a number above 0 is needed"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "8"}}, r"factor = 8: a number above 0 is needed"),
        ({"rms_norm_eps": -1.0}, r"norm_eps = -1.0: a number not below 0"),
        ({"attention_dropout": 0.1}, r"attention_dropout = 0.1: not available; to train without, set it to 0 in this"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, r"architectures = .*: not a class of"),
        ({"head_dim": 7}, r"rotary_fraction = 1: RoPE would rotate 7 of 7 columns"),
    ],
)
def test_a_folder_that_no_family_has_is_refused(changes: dict[str, Any], says: str, folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError, match=rf'command line: model.flavor = "{folder}": config.json: {says}'):
        checked("--model.flavor", str(folder))


@pytest.mark.parametrize(
    ("flavor", "says"),
    [
        ("org/name", "no such folder; python -m components.data fetch org/name brings one of the hub"),
        ("/no/such", "no such folder"),
        ("./tests", "the folder has no config.json, which says the model"),
        ("tests", "not one of debug, .*; a folder is written with a slash, ./name"),
        ("hf://org/name", "a URL; expected a path of this machine"),
        ("~nobody-here/x", "no home folder of this user is known"),
    ],
)
def test_what_is_no_folder_of_a_model_is_told(flavor: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f'command line: model.flavor = "{re.escape(flavor)}": {says}'):
        checked("--model.flavor", flavor)


def test_architectures_of_a_model_without_head_are_accepted(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["Qwen3Model"]}))
    checked("--model.flavor", str(folder))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("n_layer 3", "model.sizes.n_layer = 3: unknown; did you mean n_layers?"),
        ("hidden_size 64", "model.sizes.hidden_size = 64: unknown; did you mean dim?"),
        ("zzz 1", "model.sizes.zzz = 1: unknown; the model has dim, n_layers"),
        ("n_layers 3.5", "model.sizes.n_layers = 3.5: expected an integer"),
        ("n_layers true", "model.sizes.n_layers = true: expected an integer"),
        ("vocab_size many", 'model.sizes.vocab_size = "many": expected an integer, or "tokenizer"'),
        ("qk_norm true", "model.sizes.qk_norm = true: Hugging Face's llama would have False; gemma3, "),
        ("n_heads 7", "model.sizes: dim = 256, n_heads = 7: heads need equal widths; set head_size"),
        ("rope_scaling 3", "model.sizes.rope_scaling = 3: it has a table of its own, [model.rope_scaling]"),
        ('frozen ["layers.9"]', "model.sizes: frozen = ['layers.9']: no parameter has such a name"),
        ("a.b 3", "model.sizes.a.b = 3: unknown key"),
        ("frozen layers.0", 'model.sizes.frozen = "layers.0": expected a list of a string'),
        ("rope_theta -5", "model.sizes: rope_theta = -5: a number above 0 is needed"),
        ("norm_eps -1", "model.sizes: norm_eps = -1: a number not below 0 is needed"),
        ("head_size 0", "model.sizes: head_size = 0: a number above 0 is needed"),
        ("full_every -2", "model.sizes: full_every = -2: a number not below 0 is needed"),
        ("vocab_size 0", "model.sizes: vocab_size = 0: a number above 0 is needed"),
    ],
)
def test_a_size_that_the_family_does_not_have_is_refused(words: str, says: str) -> None:
    name, _, value = words.partition(" ")
    with pytest.raises(ConfigError, match=re.escape(says)):
        checked(f"--model.sizes.{name}", value)


@pytest.mark.parametrize(
    ("family", "words", "says"),
    [
        ("granite", "n_kv_heads 3", "n_heads = 8, n_kv_heads = 3: groups of heads must be equal"),
        ("granite", "logits_scaling 0", "logits_scaling = 0: a number above 0 is needed"),
        ("deepseek_v3", "score softmax", "model.sizes.normalised = True: Hugging Face's deepseek_v3 would have False"),
        ("deepseek_v3", "v_dim 128", "v_dim = 128: values are at most as wide as keys, 48"),
        ("deepseek_v3", "nope_dim 0", "nope_dim = 0: a number above 0 is needed"),
        ("glm4_moe", "top_k 0", "top_k = 0: a number above 0 is needed"),
        ("glm4_moe", "n_shared -1", "n_shared = -1: a number not below 0 is needed"),
        ("gemma3", "query_size -5", "query_size = -5: a number above 0 is needed"),
    ],
)
def test_sizes_that_a_family_could_not_compute_or_export_are_refused(family: str, words: str, says: str) -> None:
    name, _, value = words.partition(" ")
    with pytest.raises(ConfigError, match=re.escape(says)):
        checked("--model.name", family, f"--model.sizes.{name}", value)


@pytest.mark.parametrize("name", MODELS)
def test_no_family_skips_the_bounds(name: str) -> None:
    with pytest.raises(ValueError, match=r"n_layers = 0: a number above 0"):
        replace(MODELS[name][1]["debug"], n_layers=0)


def test_sizes_of_a_job_file_have_lines_and_the_command_line_wins(tmp_path: Path) -> None:
    path = job(tmp_path, "[model]\n[model.sizes]\nn_layers = 2\ndim = 64\nfrozen = ['layers.0']\n")
    model = checked("--job.config_file", str(path), "--model.sizes.n_layers", "3").model
    assert (sizes(model).n_layers, sizes(model).dim, sizes(model).frozen) == (3, 64, ("layers.0",))
    path = job(tmp_path, "[model]\n[model.sizes]\nn_layers = 2\ndimm = 64\n")
    with pytest.raises(ConfigError, match=r"job.toml:4: model.sizes.dimm = 64: unknown; did you mean dim\?"):
        checked("--job.config_file", str(path))
    with pytest.raises(ConfigError, match=r"model.n_layers = 2: unknown key; here it is model.sizes.n_layers"):
        checked("--model.n_layers", "2")
    with pytest.raises(ConfigError, match=r'model.sizes = "x": expected a table of names'):
        checked("--model.sizes", "x")


def test_the_tokenizer_says_the_rows(tmp_path: Path) -> None:
    needed = load_tokenizer("assets/tokenizer").rows
    words = ("--model.sizes.vocab_size", "tokenizer", "--model.hf_assets_path", "assets/tokenizer")
    assert sizes(checked(*words).model).vocab_size == -(-needed // 64) * 64
    assert sizes(checked(*words, "--model.vocab_multiple", "1000").model).vocab_size == -(-needed // 1000) * 1000
    with pytest.raises(ConfigError, match="only a run reads its tokenizer; give the number of rows here"):
        check_model(load_config([*words]))


def test_the_key_of_older_job_files_for_the_vocabulary_is_told_its_new_name() -> None:
    with pytest.raises(ConfigError, match=r"model.vocab_size = 5000: it has moved to model.sizes.vocab_size"):
        checked("--model.vocab_size", "5000")
    assert sizes(checked("--model.vocab_size", "0").model).vocab_size == 4096
    older = {"name": "llama", "flavor": "debug", "vocab_size": 5000}
    assert sizes(chosen_model({"model": older})).vocab_size == 5000
    assert sizes(chosen_model({"model": older | {"vocab_size": 0}})).vocab_size == 4096


def test_a_run_does_not_go_on_as_another_model(tmp_path: Path) -> None:
    """Although all tensors have the same names and shapes."""
    kept = {"steps": 1, "folder": str(tmp_path)}
    words = ("--checkpoint.enable", "true", "--model.sizes.norm_eps")
    observe(*words, "1e-4", **kept)
    with pytest.raises(RuntimeError, match=r"of another model: norm_eps = 0.0001 there and 0.001 here"):
        observe(*words, "1e-3", **kept)
    observe(*words, "1e-4", "--model.sizes.head_size", "16", **kept)  # as it was by default
    longer = ("--model.rope_scaling.rope_type", "linear", "--model.rope_scaling.factor", "2.0")
    observe(*words, "1e-4", *longer, **kept)


def test_a_run_from_other_weights_may_have_another_rotary_base(tmp_path: Path) -> None:
    observe("--checkpoint.enable", "true", steps=1, folder=str(tmp_path / "first"))
    start = ("--checkpoint.enable", "true", "--checkpoint.initial_load_path", str(tmp_path / "first"))
    observe(*start, "--model.sizes.rope_theta", "5e6", steps=1, folder=str(tmp_path / "next"))
    with pytest.raises(RuntimeError, match=r"of another model: norm_eps"):
        observe(*start, "--model.sizes.norm_eps", "1e-3", steps=1, folder=str(tmp_path / "other"))


def test_the_launcher_gives_ranks_the_resolved_job(folder: Path) -> None:
    from components.launch.settings import read_settings

    config = load_config([*SMALL, "--model.flavor", str(folder)])
    assert config.model.name == ""
    found = check_layout_and_weights(config, read_settings(config, {"NGPU": "1"}))
    assert (found.model.name, found.model.sizes["n_layers"]) == ("qwen3", QWEN3.n_layers)
