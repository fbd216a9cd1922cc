"""What `titanlite verify` runs on the ranks of a mesh."""

from unittest.mock import patch

import pytest
from torch import Tensor

from tests.distributed.scenarios import CPU, config_of, learnable_data
from titanlite.config.schema import Config
from titanlite.tools import verify
from titanlite.verify.compare import Trajectory, compare, relative_difference

HERE = "tests.distributed.test_verify"


def verified(degrees: dict[str, int], config: Config, in_float64: bool = False) -> Trajectory | dict[str, Tensor]:
    """As a rank of `verify` does, on the learnable data."""
    with patch.object(verify, "open_data", lambda config, _: learnable_data(config)):
        return verify._gradients(CPU, config, degrees) if in_float64 else verify._record(CPU, config, degrees, not degrees)


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"dp_shard": 2}], ids=str)
def test_a_fork_with_dropout_is_equal_on_every_mesh(pools, degrees):
    """It was called NOT equal, since dropout draws other numbers on every mesh."""

    def of(degrees: dict[str, int], **more: bool):
        config = config_of(degrees, model={"name": "tests.tiny_dropout"}, training={"steps": 2})
        return pools[2 if degrees else 1].run(f"{HERE}:verified", degrees=degrees, config=config, **more)[0]

    alone = of({})
    assert compare(of(degrees), alone).excessive == []
    wide = of({}, in_float64=True)
    assert max(relative_difference(alone.gradients[name], wide[name]) for name in wide) < 1e-4
