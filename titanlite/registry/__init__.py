"""A model family by its name: the folder models/ is the registry, and a dotted name is a module of the user's own.

family.py       [model] name and flavor -> the module and its dimensions
overrides.py    model.overrides
description.py  the config.json of a folder in Hugging Face's format
check.py        a check of a configuration: its faults, and the checks that it needs
limits.py       checks of a run against what a family declares that it cannot do
own.py          code of the user's own that keys name
source.py       the source code that a model consists of, and what has changed since a checkpoint
"""
