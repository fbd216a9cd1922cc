"""Verified checkpoints: DCP stores the tensors; manifest.json has the numbers of the run and the checksum of every file.

    <folder>/step-00000100/manifest.json, .metadata, __0_0.distcp, __1_0.distcp ...

    tensors.py   the names of a model's tensors in a checkpoint
    manifest.py  the commit mark: written last, checked first
    storage.py   DCP's writer and reader, with checksums, and without running code that a file names
    folder.py    names, the checkpoints of a run, retention, cleaning up
    save.py      synchronous and asynchronous saving
    load.py      finds the newest intact checkpoint, and loads its tensors onto any mesh
    whole.py     reads one tensor at a time in a single process, for conversions

A checkpoint is written to a folder with a temporary name, read back, and then renamed. A folder with a final name was complete.
"""
