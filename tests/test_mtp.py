"""Multi-token prediction: the paper's loss, every layout's run, DeepSeek's files, and planted faults."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import train
from components.commands.figures import Observation, broken_bars
from components.commands.start import check_initial_weights
from components.config import ConfigError, Model, load_config
from components.state import weights
from models import MODELS, meta_model, mtp
from models.moe import MixtureBlock
from models.objective import objective_of, with_objective
from models.transformer import Transformer
from tests.harness import Case, observe, observe_all, rewrite
from tests.small import RECIPE, SMALL

FACTOR, DEPTH = 0.3, 2
TOKENS = [[5, 9, 1, 7, 7, 3, 2, 8, 4, 6, 11, 12, 10], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]]
DOCUMENTS = [[0] * 5 + [1] * 4 + [2] * 3, [0] * 12]
UNTRAINED = [(0, 2), (1, 6)]
"""Rows and positions without a label."""


def small_model(name: str, **more: Any) -> Transformer:
    """A model with random weights of some size, in float32."""
    torch.manual_seed(0)
    flavor = "tiny_sigmoid" if name == "deepseek_v3" else "tiny"
    model = meta_model(Model(name=name, flavor=flavor, sizes={"mtp_layers": DEPTH, **more})).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2 if parameter.ndim > 1 else 1.0)
    model.tie_weights()
    return with_objective(model, objective_of("next_token", mtp=FACTOR))  # type: ignore[return-value]


def batch(documents: bool = True) -> dict[str, Tensor]:
    tokens, ids = torch.tensor(TOKENS), torch.tensor(DOCUMENTS)
    labels = tokens[:, 1:].clone()
    for row, position in UNTRAINED:
        labels[row, position] = -100
    columns = {"tokens": tokens[:, :-1], "labels": labels}
    if documents:
        starts = torch.stack([torch.tensor([row.index(each) for each in row]) for row in DOCUMENTS])
        columns |= {"document_ids": ids, "positions": torch.arange(ids.shape[1]) - starts}
    return columns


def rms(x: Tensor, norm: Any) -> Tensor:
    return norm.weight * x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()


def layer(model: Any, number: int, x: Tensor) -> Tensor:
    """TRM of the paper, over one document; a mixture multiplies with its experts by the model's own code."""
    block, positions = model.layers[str(number)], torch.arange(x.shape[1])[None]
    angles, visible = model._rotation(positions, False, True), model._visible(positions, None, False)
    x = x + block.attention(rms(x, block.attention_norm), *angles, visible)
    more = (None,) if isinstance(block, MixtureBlock) else ()
    return x + block.feed_forward(rms(x, block.ffn_norm), *more)


def paper(model: Any, documents: bool = True) -> tuple[Tensor, Tensor]:
    """Main loss and (1 / D) sum of L_MTP^k by equations 21 to 25, both with T = number of labels as divisor.

    Each document is computed alone, over the positions that have a token k ahead.
    """
    main = ahead = torch.zeros(())
    given = batch()["labels"]
    count = (given != -100).sum()
    for row, tokens in enumerate(TOKENS):
        ids = DOCUMENTS[row] if documents else [0] * len(DOCUMENTS[row])
        for document in sorted({*ids}):
            first, length = ids.index(document), ids.count(document)
            own, labels = torch.tensor(tokens[first : first + length]), given[row, first : first + length]
            hidden = model.tok_embeddings.weight[own][None]
            for number in range(model.config.n_layers):
                hidden = layer(model, number, hidden)
            hidden = rms(hidden, model.norm)
            main = main + F.cross_entropy(hidden[0] @ model.output.weight.T, labels, reduction="sum")
            for depth in range(1, DEPTH + 1):
                number, kept = model.config.n_layers + depth - 1, length - depth
                if kept <= 0:
                    break
                parts = model.layers[str(number)].mtp
                embedded = model.tok_embeddings.weight[own[depth:]][None]
                pair = torch.cat((rms(embedded, parts.enorm), rms(hidden[:, :kept], parts.hnorm)), -1)
                hidden = rms(layer(model, number, pair @ parts.eh_proj.weight.T), parts.norm)
                wanted = labels[depth:].clone()
                if first + length < len(ids):
                    wanted[-1] = -100  # the next document's first token
                ahead = ahead + F.cross_entropy(hidden[0] @ model.output.weight.T, wanted, reduction="sum") / DEPTH
    return main / count, ahead / count


def step(model: Any, documents: bool = True) -> tuple[float, list[Tensor]]:
    """The model's own loss, and its gradients."""
    given = mtp.look_ahead(batch(documents), DEPTH)
    loss = model(**given) / (given["labels"] != -100).sum()
    return loss.item(), list(torch.autograd.grad(loss, _trained(model)))


def _trained(model: Any) -> list[Tensor]:
    return [each for each in model.parameters() if each.requires_grad]


def compare(name: str, documents: bool = True, **more: Any) -> float:
    """The worst relative error of the loss and of all gradients against the paper's formula."""
    model = small_model(name, **more)
    loss, gradients = step(model, documents)
    main, ahead = paper(model, documents)
    right = torch.autograd.grad(main + FACTOR * ahead, _trained(model))
    head = model.output
    assert head is not None
    assert head.logged is not None
    count = (batch()["labels"] != -100).sum()
    errors = [
        *((head.logged / count).tolist()[number] / right.item() - 1 for number, right in enumerate((main, ahead))),
    ]
    errors = [abs(each) for each in errors] + [
        ((own - other).norm() / other.norm().clamp(min=1e-3)).item()
        for own, other in zip(gradients, right, strict=True)
    ]
    return max(abs(loss / (main + FACTOR * ahead).item() - 1), *errors)


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_loss_and_gradients_are_those_of_the_paper(name: str, documents: bool) -> None:
    assert compare(name, documents) < 1e-5


def test_a_tied_table_has_all_gradients() -> None:
    assert compare("llama", tie_embeddings=True) < 1e-5


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        ("look_ahead", "labels.where(own, IGNORED)", "labels"),
        ("look_ahead", "(layer, layer + 1)", "(layer,)"),
        (
            "Mtp.forward",
            "self.enorm(embedded_BSD), self.hnorm(hidden_BSD)",
            "self.hnorm(hidden_BSD), self.enorm(embedded_BSD)",
        ),
        ("stack", "bool(layer) / layers", "bool(layer)"),
    ],
    ids=["a label in another document", "a label after its document", "embedding last", "no mean over layers"],
)
def test_a_fault_of_the_formula_is_found(function: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import models.transformer

    owner: Any = mtp.Mtp if "." in function else mtp
    last = function.rpartition(".")[2]
    for each in (owner, models.transformer):
        if hasattr(each, last):
            monkeypatch.setattr(each, last, getattr(each, last))  # undone at the end
    rewrite("models.mtp", function, old, new)
    assert compare("llama") > 1e-3


def test_columns() -> None:
    """Labels stay in their document, and are trained; without gradients there are none."""
    given = batch()
    found = mtp.look_ahead(given, 2)
    assert found["mtp_tokens_1"][0].tolist() == [9, 1, 7, 7, 3, 2, 8, 4, 6, 11, 12, 0]
    assert found["mtp_labels_1"][0].tolist() == [1, -100, 7, -100, -100, 8, 4, -100, -100, 12, 10, -100]
    assert found["mtp_labels_2"][0].tolist() == [-100, 7, -100, -100, -100, 4, -100, -100, -100, 10, -100, -100]
    assert found["mtp_labels_1"][1].tolist() == [4, 1, 5, 9, 2, -100, 5, 3, 5, 8, 9, -100]
    assert mtp.look_ahead(given, 0) is given
    with torch.no_grad():
        assert mtp.look_ahead(given, 2) is given
    assert mtp.look_ahead({name: column[:, :1] for name, column in given.items()}, 3)["mtp_labels_3"].eq(-100).all()


@pytest.mark.parametrize("name", MODELS)
def test_every_family_has_layers_for_it(name: str) -> None:
    """Names in Hugging Face's files are different ones, and FLOPs and kinds know the layers."""
    model, without = (meta_model(Model(name=name, flavor="tiny", sizes={"mtp_layers": count})) for count in (1, 0))
    names = [name for name, _ in model.named_parameters()]
    assert {name.partition("mtp.")[2] for name in names if ".mtp." in name} == {
        *("enorm.weight", "hnorm.weight", "norm.weight", "eh_proj.weight"),
    }
    behind = f"model.layers.{model.config.n_layers}."
    there = [weights._part(model.hf_name(each)) for each in names if weights._part(model.hf_name(each)).name]
    assert len({*there}) == len(there)
    if model.hf_type:
        assert {f"{behind}{each}.weight" for each in ("enorm", "hnorm", "eh_proj", "shared_head.norm")} <= {
            part.name for part in there
        }
        assert model.hf_config()["num_nextn_predict_layers"] == 1
    dim, rows = model.config.dim, model.config.vocab_size
    assert model.flops_per_token(32)[0] > without.flops_per_token(32)[0] + 6 * (2 * dim * dim + dim * rows)
    assert without.hf_config().get("num_nextn_predict_layers", 0) == 0
    assert not any(flavor.mtp_layers for flavor in MODELS[name][1].values()), "JobConfig.mtp_layers would not know"


P = "--parallelism."
MTP = ("--model.sizes.mtp_layers", "1", "--training.mtp_loss_factor", "0.5")
LONG = ("--model.flavor", "long")
VALIDATED = ("--validation.enable", "true", "--validation.held_out_fraction", "0.02")
MIXED = (*MTP, *VALIDATED, "--model.name", "deepseek_v3", "--model.flavor", "tiny_sigmoid", "--training.document_mask")
TWO = ("--model.sizes.mtp_layers", "2", *LONG)
HALF = ("--training.local_batch_size", "18", f"{P}data_parallel_shard_degree", "2")
TP, CP = (f"{P}tensor_parallel_degree", "2"), (f"{P}context_parallel_degree", "2")
METHOD, SCHEDULE = f"{P}context_parallel_method", f"{P}pipeline_parallel_schedule"
PP = (f"{P}pipeline_parallel_degree", "2", f"{P}pipeline_parallel_microbatch_size", "9")
NO_SEQUENCE = (f"{P}sequence_parallel", "false", f"{P}loss_parallel", "false")
LAYOUTS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "fsdp": (2, (*MTP, *VALIDATED), (*HALF, f"{P}fsdp_reshard_after_forward", "always")),
    "tp": (2, (*MTP, *VALIDATED), TP),
    "tp, whole": (2, (*MTP, *VALIDATED), (*TP, *NO_SEQUENCE)),
    "cp, ring": (2, MIXED, (*CP, METHOD, "ring")),
    "cp, gathered": (2, MIXED, (*CP, METHOD, "allgather_kv")),
    "cp, ulysses": (2, MIXED, (*CP, METHOD, "ulysses")),
    "ep": (2, MIXED, (*HALF, f"{P}expert_parallel_degree", "2")),
    "1F1B": (2, TWO, PP),
    "parts": (2, TWO, (*PP, f"{P}pipeline_parallel_sequence_splits", "2")),
    "Interleaved1F1B": (2, TWO, (*PP, SCHEDULE, "Interleaved1F1B")),
    "ZBV": (2, (*MTP, *LONG), (*PP, SCHEDULE, "ZBVZeroBubble", "--activation_checkpoint.mode", "full")),
    "frozen table, ZBV": (2, (*TWO, "--model.sizes.frozen", '["tok_embeddings"]'), (*PP, SCHEDULE, "ZBVZeroBubble")),
    "tied, pp, tp": (4, (*MTP, "--model.flavor", "long_tied"), (*PP, *TP)),
    "pp, cp": (4, TWO, (*PP, *CP)),
    "lora, tp": (2, (*MTP, "--lora.rank", "4"), TP),
    "compiled, tp": (2, MTP, (*TP, "--compile.enable", "--compile.backend", "aot_eager")),
    "terms, tp": (2, (*MTP, "--training.z_loss_factor", "0.01", "--training.label_smoothing", "0.2"), TP),
}
SLOW = {
    "ep",
    "cp, ring",
    "cp, ulysses",
    "1F1B",
    "Interleaved1F1B",
    "frozen table, ZBV",
    "tied, pp, tp",
    "pp, cp",
    "compiled, tp",
    "lora, tp",
}


@functools.cache
def one_process(run: tuple[str, ...]) -> Observation:
    return observe(*run, steps=2)


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in LAYOUTS])
def test_every_layout_is_the_run_of_one_process(name: str) -> None:
    ranks, run, layout = LAYOUTS[name]
    assert broken_bars(observe(*run, *layout, ranks=ranks, steps=2), one_process(run)) == {}


def _logged(run: train.Run) -> dict[str, float]:
    loss = torch.zeros(())
    return {
        name: each for name, each in train.row_of(loss, run.logged, run.objective, run.mesh).items() if name != "loss"
    }


def test_a_step_logs_both_losses_and_a_validation_has_one() -> None:
    """The first step's loss is the model's and the factor times that of multi-token prediction."""
    with_mtp, without = (observe(*run, *VALIDATED, steps=1, at_end=_logged) for run in (MTP, ()))
    parts = with_mtp.extra
    assert {*parts} == {"mtp_loss", "unregularized_loss"}
    assert with_mtp.losses[0] == pytest.approx(parts["unregularized_loss"] + 0.5 * parts["mtp_loss"], rel=1e-6)
    assert parts["unregularized_loss"] == pytest.approx(without.losses[0], rel=1e-6)
    assert parts["mtp_loss"] == pytest.approx(without.losses[0], rel=0.1)
    assert with_mtp.validation_loss == pytest.approx(without.validation_loss, rel=1e-3)
    assert without.extra == {}


FAULTS = {
    "tokens ahead are taken after the sequence is sharded": (
        CP,
        "train",
        "own_part",
        "shard_sequence(look_ahead(on_device, run.config.mtp_layers), run.mesh, run.config.parallelism)",
        "look_ahead(shard_sequence(on_device, run.mesh, run.config.parallelism), run.config.mtp_layers)",
    ),
    "padding has labels": (
        (*CP, "--training.seq_len", "33"),
        "parallelize.padding",
        "_padded",
        '-100 if "labels" in name',
        '-100 if name == "labels"',
    ),
    "each end has its own gradient of the table": (
        (*PP, *LONG),
        "parallelize.pipeline",
        "Pipeline.forward_backward",
        "if last:",
        "if False:",
    ),
    "the norm counts both tables": (
        (*PP, *LONG),
        "components.optim.optimizer",
        "clip_gradients",
        "if not is_copy(parameter)",
        "if True",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_layout_is_found(fault: str) -> None:
    """A run whose ends differ ends with an error."""
    layout, *planted = FAULTS[fault]
    run = (*MTP, *(word for word in layout if word in {*LONG, "--training.seq_len", "33"}))
    plant = functools.partial(rewrite, *planted)
    (observed,) = observe_all([Case((*run, *layout), 2, steps=2, mutate=plant)])
    if isinstance(observed, Exception):
        assert "is not the same in two stages" in str(observed)
    else:
        assert broken_bars(observed, one_process(run))


def published(folder: Path, **changed: Tensor) -> dict[str, Tensor]:
    """Writes a folder as DeepSeek's: the layer's tensors, with copies of embedding and head."""
    model = meta_model(Model(name="deepseek_v3", flavor="tiny_sigmoid", sizes={"mtp_layers": 1}))
    generator, tensors = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for name, parameter in model.named_parameters():
        for part, piece in weights._pieces(model, name, parameter):
            random = torch.randn(piece.shape, generator=generator) * 0.1
            tensors[part.name] = random.to(model.hf_dtype(name, torch.bfloat16))
    behind = f"model.layers.{model.config.n_layers}"
    tensors[f"{behind}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{behind}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    folder.mkdir(exist_ok=True)
    save_file(tensors | changed, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.hf_config()), encoding="utf-8")
    return tensors | changed


def _export(run: train.Run, checkpoint: Path, target: Path) -> None:
    weights.export(meta_model(run.config.model), checkpoint, target, "assets/tokenizer", torch.bfloat16)


@pytest.mark.parametrize("layers", [1, 0])
def test_published_files_come_back_byte_by_byte(layers: int, tmp_path: Path) -> None:
    """Without layers of multi-token prediction, the folder's are left out."""
    before = published(tmp_path / "there")
    words = (
        *("--model.name", "deepseek_v3", "--model.flavor", "tiny_sigmoid", "--model.sizes.mtp_layers", str(layers)),
        *("--checkpoint.enable", "true", "--checkpoint.initial_load_in_hf", "true"),
        *("--checkpoint.initial_load_path", str(tmp_path / "there"), *TP, *HALF),
    )
    export = functools.partial(_export, checkpoint=tmp_path / "run" / "step-0", target=tmp_path / "back")
    observe(*words, ranks=4, steps=0, folder=str(tmp_path / "run"), at_end=export)
    after = {name: each for file in (tmp_path / "back").glob("*.safetensors") for name, each in load_file(file).items()}
    kept = {name for name in before if layers or not name.startswith("model.layers.2.")}
    assert after.keys() == kept
    assert len(before) > len(after) or layers
    for name in kept:
        assert before[name].dtype == after[name].dtype
        assert before[name].view(torch.uint8).equal(after[name].view(torch.uint8)), name
    written = json.loads((tmp_path / "back" / "config.json").read_text(encoding="utf-8"))
    assert written["num_nextn_predict_layers"] == layers


def test_a_copy_that_differs_is_a_mistake(tmp_path: Path) -> None:
    model = meta_model(Model(name="deepseek_v3", flavor="tiny_sigmoid", sizes={"mtp_layers": 1}))
    behind = f"model.layers.{model.config.n_layers}"
    tensors = published(tmp_path)
    weights.check_weights(model, tmp_path)
    published(tmp_path, **{f"{behind}.shared_head.head.weight": tensors["lm_head.weight"] + 1})
    with pytest.raises(ConfigError, match=f"{behind}.shared_head.head.weight differs from lm_head.weight, which multi"):
        weights.check_weights(model, tmp_path)
    published(tmp_path, **{f"{behind}.hnorm.weight": torch.ones(3)})
    with pytest.raises(ConfigError, match=f"{behind}.hnorm.weight is"):
        weights.check_weights(model, tmp_path)


def test_a_folder_of_another_family_may_have_such_layers(tmp_path: Path) -> None:
    """config.json tells of them; without it, a layer more is a mistake."""
    with_mtp, model = (meta_model(Model(flavor="tiny", sizes={"mtp_layers": count})) for count in (1, 0))
    pieces = [each for name, one in with_mtp.named_parameters() for each in weights._pieces(with_mtp, name, one)]
    save_file({part.name: torch.ones(piece.shape) for part, piece in pieces}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model.layers.2.enorm.weight is not in this model"):
        weights.check_weights(model, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(with_mtp.hf_config()), encoding="utf-8")
    weights.check_weights(model, tmp_path)
    weights.check_weights(with_mtp, tmp_path)
    assert "tensors that the model does without, such as model.layers.2." in weights.left_out(model, tmp_path)


def said_of(run: train.Run, path: Path) -> str:
    return weights.left_out_of_stages(run.stages, path)


def test_layers_that_a_folder_lacks_begin_new(tmp_path: Path) -> None:
    """The folder has one of two layers: the other starts from the weights of step 0, at a layout too."""
    model = meta_model(Model(flavor="tiny", sizes={"mtp_layers": 1}))
    generator, given = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for name, one in model.named_parameters():
        for part, piece in weights._pieces(model, name, one):
            given[part.name] = torch.randn(piece.shape, generator=generator)
    save_file(given, tmp_path / "model.safetensors")
    more = ("--model.flavor", "tiny", "--model.sizes.mtp_layers", "2")
    start = ("--checkpoint.initial_load_in_hf", "true", "--checkpoint.initial_load_path", str(tmp_path))
    words = (*more, "--checkpoint.enable", "true", *start)
    degrees = (
        *("--parallelism.tensor_parallel_degree", "2", "--parallelism.pipeline_parallel_degree", "2"),
        *("--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"),  # two stages on a rank
    )
    at_end = functools.partial(said_of, path=tmp_path)
    observed = observe(*words, *degrees, ranks=4, steps=0, folder=str(tmp_path / "run"), at_end=at_end)
    loaded = observed.weights
    deeper = meta_model(Model(flavor="tiny", sizes={"mtp_layers": 2}))
    said = "; it lacks layers.3: multi-token prediction begins with the weights of step 0"
    assert weights.left_out(deeper, tmp_path) == said == observed.extra
    fresh = observe(*more, steps=0).weights
    for name, found in loaded.items():
        if name.startswith("layers.3."):
            assert torch.equal(found, fresh[name]), name
        else:
            (there,) = (part.turned(given[part.name]) for part, _ in weights._pieces(model, name, found))
            assert torch.equal(found, there), name
    job = ["--job.config_file", str(RECIPE), *SMALL, *more, *start]
    check_initial_weights(load_config(job))
    with pytest.raises(ConfigError, match=r"mtp_layers = 2: .* lacks layers: adapters would never train them"):
        check_initial_weights(load_config([*job, "--lora.rank", "4"]))
    without = tmp_path / "model.safetensors"
    save_file({name: each for name, each in given.items() if "layers.2.enorm" not in name}, without)
    with pytest.raises(ConfigError, match=r"model.layers.2.enorm.weight is missing"):
        check_initial_weights(load_config(job))
