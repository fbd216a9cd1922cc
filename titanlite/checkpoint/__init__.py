"""Checkpoints that cannot lie: DCP holds the tensors, manifest.json the numbers and the checksum of every file.

    <folder>/step-00000100/manifest.json, .metadata, __0_0.distcp, __1_0.distcp ...

    tensors.py   what of a run is a tensor, and its name
    manifest.py  the commit mark: written last, checked first
    storage.py   DCP's writer and reader, with checksums, and without running code that a file brings along
    folder.py    names, what is there, what is kept, what is cleaned up
    save.py      writing, while training goes on or waits
    load.py      the newest sound checkpoint, and its tensors onto whatever mesh there is
    whole.py     its tensors one at a time, in a single process, for what converts it

A checkpoint is written in a folder of a temporary name, read back, and then renamed: what has a final name was whole.
"""
