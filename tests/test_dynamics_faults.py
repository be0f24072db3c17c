"""Faults planted in the code of dynamics: each makes the table wrong that it should."""

from dataclasses import dataclass

import pytest

from components.commands.figures import Observation
from tests.dynamics import CP, LOCAL, PP, REPLICATE, SHARD, TP, case, one_process, wrong
from tests.harness import observe_all, rewrite


@dataclass(frozen=True)
class Fault:
    """A piece of the code, what it becomes, and where its numbers are then wrong."""

    function: str
    old: str
    new: str
    kind: str
    layout: tuple[str, ...]
    table: str
    ranks: int = 2

    def plant(self) -> None:
        module, _, function = self.function.partition(":")
        rewrite(module, function, self.old, self.new)


LOGIT = "attention_logit_max"
SHARDS, UPDATED, CORE = "_Shards.squares", "Dynamics.after_update", "models.attention:AttentionCore.observe"
FAULTS = {
    "tp not summed": Fault(
        f"components.observe.dynamics:{SHARDS}",
        "in self.groups:",
        "in self.groups[:-1]:",
        "qwen3",
        (TP, "2"),
        "weight_norm",
    ),
    "replicas counted twice": Fault(
        "parallelize.sharding:local_part",
        "if not placement.is_replicate()",
        "",
        "qwen3",
        (REPLICATE, "2", LOCAL, "6"),
        "gradient_norm",
    ),
    "a stage forgotten": Fault(
        f"components.observe.dynamics:{UPDATED}",
        'if self.mesh["pp"].size() > 1',
        "if False",
        "six layers",
        (PP, "2"),
        "weight_norm",
    ),
    "logits of one rank's sequences": Fault(
        f"components.observe.dynamics:{UPDATED}",
        '"fsdp", ',
        "",
        "qwen3",
        (SHARD, "2", LOCAL, "6"),
        LOGIT,
    ),
    "a stage that learns its shapes from whatever is in memory": Fault(
        "parallelize.pipeline:Pipeline.__init__",
        "input_args=hidden if number else tokens,",
        "",
        "six layers",
        (PP, "2", "--debug.deterministic"),  # then whatever is in memory is NaN
        LOGIT,
    ),
    "gradients after clipping": Fault(
        "train:train_step",
        "    accepted =",
        "    run.dynamics.before_update()\n    accepted =",
        "qwen3",
        (),
        "gradient_norm",
        1,
    ),
    "logits without scale": Fault(CORE, "q.detach()", "(q.detach() * q.shape[3] ** 0.5)", "qwen3", (), LOGIT, 1),
    "documents see each other": Fault(CORE, "part.documents_BT", "None", "qwen3", (), LOGIT, 1),
    "keys in the order of ranks": Fault(
        "parallelize.context:_RingCore._observe_all",
        "sequence_order(whole, 2, cp.size(), self.balanced)",
        "whole",
        "llama",
        (CP, "2"),
        LOGIT,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    fault = FAULTS[name]
    (observed,) = observe_all([case(fault.kind, *fault.layout, ranks=fault.ranks, mutate=fault.plant)])
    assert isinstance(observed, Observation), observed
    different = wrong(observed.dynamics, one_process()[fault.kind].dynamics)
    assert fault.table in {table for table, _ in different}, different
