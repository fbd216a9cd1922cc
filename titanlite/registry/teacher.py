"""The teacher of a distillation run: its configuration is derived from that of the run."""

import functools
from pathlib import Path
from typing import Any

from models.moe import experts_of
from titanlite.config.schema import Config, Moe
from titanlite.ground.errors import UserError
from titanlite.registry.description import read_description
from titanlite.registry.family import FROM_ASSETS, family_of, load_module, reader_of
from titanlite.registry.source import ModelSource, source_of

_ONE = "; one family must have it in HF_TYPES, and no other, such as a copy"


def config_of_teacher(config: Config) -> Config | None:
    """The configuration of `distillation.teacher` on the run's mesh; None where there is no teacher.

    It has the mesh, the precision and the compiler settings of the student, and nothing else. Raises UserError for a folder
    that no family reads.
    """
    folder, training = config.distillation.teacher, config.training
    if not folder:
        return None
    if not Path(folder).is_dir():
        raise UserError("there is no such folder")
    keys = {"name": reader_of(read_description(Path(folder)), _ONE), "flavor": FROM_ASSETS, "hf_assets_path": folder}
    model = config.model.model_copy(update={**keys, "overrides": {}, "attention": "auto"})
    parallelism = config.parallelism
    if not experts_of(family_of(model).on_meta()):
        parallelism = parallelism.model_copy(update={"expert_parallel_degree": 1})
    kept: dict[str, Any] = {"dtype": training.mixed_precision_param}  # frozen weights need no master copy
    kept |= {"loss": "cross_entropy", "loss_options": {}, "z_loss": 0.0}
    return Config(
        model=model,
        training=training.model_copy(update=kept),
        parallelism=parallelism,
        moe=Moe(max_tokens_factor=config.moe.max_tokens_factor),
        compile=config.compile,
    )


@functools.cache  # each checkpoint holds it; the folder is read once
def source_of_teacher(folder: str) -> ModelSource:
    """The source code of the teacher's family. Raises UserError for a folder that no family reads."""
    return source_of(load_module(reader_of(read_description(Path(folder)), _ONE)))
