"""Looks up a model family by name: the folder models/ is the registry, and a dotted name is a module of the user's own.

family.py       [model] name and flavor -> the module and its dimensions
overrides.py    model.overrides
description.py  the config.json of a folder in Hugging Face's format
check.py        a configuration check: the faults that it reports, and the checks that it depends on
limits.py       checks of a run against the limits that its family declares
own.py          the user's own code that configuration keys name
source.py       a model's source code, and what has changed in it since a checkpoint
"""
