"""The configuration: what a TOML file can say, and how it is read. Imports no torch.

schema.py     every key: type, bounds, default, meaning, and when it has an effect; some sections are in data.py (sources,
              validation) and operation.py (saving, reporting, watching)
tables.py     what all tables of keys have in common
conflicts.py  settings that exclude each other
read.py       TOML files, their bases and the command line, merged and validated once
"""
