"""Keys: a misspelt one, or one of another system, is refused with the right one; torchtitan's are known by name."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from components.config import ConfigError, load_config
from tests.jobs import KEYS, TITAN, TITAN_UNSET, as_toml, job, refused

# Unknown keys


def misspellings(word: str) -> Iterator[str]:
    """One letter dropped, doubled, swapped with the next or replaced: at the start, in the middle, at the end."""
    for at in (0, len(word) // 2, len(word) - 1):
        yield word[:at] + word[at + 1 :]
        yield word[: at + 1] + word[at:]
        yield word[:at] + word[at + 1 : at + 2] + word[at] + word[at + 2 :]
        yield word[:at] + ("x" if word[at] != "x" else "y") + word[at + 1 :]


def suggestions(folder: Path, typos: dict[str, str]) -> tuple[int, list[str]]:
    """How many of these misspelt keys are refused, and the messages that don't name the right one."""
    keys, messages = list(typos), {}
    parts = ["\n".join(f"{key} = 1" for key in keys[at : at + 99]) for at in range(0, len(keys), 99)]
    path = folder / "job.toml"
    for message in (message for part in parts for message in refused("--job.config_file", job(folder, part))):
        place, _, rest = message.partition(": ")
        typo, _, reason = rest.partition(" = 1: ")
        assert place.startswith(f"{path}:"), message
        assert reason.startswith("unknown"), message
        messages[typo] = reason
    assert set(messages) == set(typos)
    return len(messages), [
        f"{typo}: {messages[typo]}" for typo, right in typos.items() if f"did you mean {right}?" not in messages[typo]
    ]


def report(capsys: pytest.CaptureFixture[str], what: str, count: int, wrong: list[str]) -> None:
    with capsys.disabled():
        print(f"\n{what}: {count} refused of {count}, {1 - len(wrong) / count:.2%} with the right suggestion")


def test_every_misspelt_key_is_refused_with_the_right_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typos = {
        f"{table}.{typo}": key
        for key in KEYS
        for table, _, last in [key.rpartition(".")]
        for typo in misspellings(last)
        if typo and typo != last and f"{table}.{typo}" not in KEYS
    }
    count, wrong = suggestions(tmp_path, typos)
    report(capsys, "misspelt keys", count, wrong)
    assert count > 1500
    assert len(wrong) <= 0.05 * count, wrong


def test_every_misspelt_table_is_refused_with_the_right_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typos = {
        f"{typo}.{last}": key
        for key in KEYS
        for table, _, last in [key.rpartition(".")]
        for typo in misspellings(table)
        # ".." and a first or last dot are not TOML.
        if typo != table and "" not in typo.split(".") and f"{typo}.{last}" not in KEYS
    }
    count, wrong = suggestions(tmp_path, typos)
    report(capsys, "misspelt tables", count, wrong)
    assert count > 1500
    assert len(wrong) <= 0.05 * count, wrong


SHARD = "parallelism.data_parallel_shard_degree"
REPLICATE = "parallelism.data_parallel_replicate_degree"
RESHARD = "parallelism.fsdp_reshard_after_forward"
TENSOR, CONTEXT, PIPELINE = (f"parallelism.{axis}_parallel_degree" for axis in ("tensor", "context", "pipeline"))

PEERS = [
    # accelerate
    ("dp_replicate_size", 2, [REPLICATE]),
    ("dp_shard_size", 2, [SHARD]),
    ("tp_size", 2, [TENSOR]),
    ("cp_size", 2, [CONTEXT]),
    # axolotl
    ("tensor_parallel_size", 2, [TENSOR]),
    ("context_parallel_size", 2, [CONTEXT]),
    ("sequence_parallel_degree", 2, [CONTEXT]),
    # Fast-LLM
    ("tensor_parallel", 2, [TENSOR]),
    ("pipeline_parallel", 2, [PIPELINE]),
    ("sequence_data_parallel", 2, [CONTEXT]),
    ("sequence_tensor_parallel", True, ["parallelism.sequence_parallel"]),
    ("breadth_first_micro_batches", 4, ["parallelism.pipeline_parallel_schedule"]),
    ("depth_first_micro_batches", 4, ["training.global_batch_size"]),
    ("micro_batch_splits", 2, [CONTEXT]),
    ("zero_stage", 1, [RESHARD, '"never" for stages 1 and 2']),
    ("zero_stage", 2, [RESHARD, '"never" for stages 1 and 2']),
    ("zero_stage", 3, [RESHARD, '"always" for stage 3']),
    # FSDP1
    ("fsdp_sharding_strategy", "FULL_SHARD", [f"{SHARD} = -1", f'{RESHARD} = "always"']),
    ("fsdp_sharding_strategy", "SHARD_GRAD_OP", [f"{SHARD} = -1", f'{RESHARD} = "never"']),
    ("fsdp_sharding_strategy", "NO_SHARD", [f"{SHARD} = 1", REPLICATE]),
    ("fsdp_sharding_strategy", "HYBRID_SHARD", [REPLICATE, f"{SHARD} = -1", f'{RESHARD} = "always"']),
]


@pytest.mark.parametrize("table", ["parallelism.", "training.", "fsdp.", ""])
def test_keys_of_other_systems_are_refused_with_ours(table: str, tmp_path: Path) -> None:
    named = 0
    for key, value, ours in PEERS:
        path = job(tmp_path, f"{table}{key} = {as_toml(value)}")
        (message,) = refused("--job.config_file", path)
        assert message.startswith(f"{path}:1: {table}{key} = {as_toml(value)}: "), message
        named += all(part in message for part in ours)
    assert named >= 0.95 * len(PEERS)


# torchtitan v0.2


def test_every_default_of_torchtitan_is_taken_or_refused_by_name(tmp_path: Path) -> None:
    taken = []
    for key, value in TITAN.items():
        path = job(tmp_path, f"{key} = {as_toml(value)}")
        try:
            load_config(["--job.config_file", str(path)])
            taken.append(key)
        except ConfigError as error:
            (message,) = error.messages
            place, _, reason = message.partition(f"{key} = {value!r}: " if isinstance(value, list) else f"{key} = ")
            assert place == f"{path}:1: ", message
            assert len(reason) > 10, message
            assert "unknown" not in reason, message
            assert "expected" not in reason, f"{message}: a type or bound that torchtitan's own default breaks"
    assert len(taken) >= 0.9 * len(TITAN)


def test_torchtitan_key_that_is_unset_there_is_known_here(tmp_path: Path) -> None:
    for key in TITAN_UNSET:
        path = job(tmp_path, f"fault_tolerance.enable = true\nvalidation.enable = true\n{key} = [[[]]]")
        *_, message = refused("--job.config_file", path)
        assert message.startswith(f"{path}:3: {key} = "), message
        assert "unknown" not in message


def test_torchtitan_spellings_keep_their_meaning(tmp_path: Path) -> None:
    text = '[model]\nname = "llama3"\nflavor = "debugmodel"\n[metrics]\ndisable_color_printing = true\n'
    config = load_config(["--job.config_file", str(job(tmp_path, text))])
    assert (config.model.name, config.model.flavor, config.metrics.color_printing) == ("llama", "debug", False)
    assert not load_config(["--metrics.disable_color_printing"]).metrics.color_printing
