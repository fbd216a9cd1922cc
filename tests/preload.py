"""Imports for ranks of pools and the commands of tests/end_to_end/forked.py, done once in the process from which they are
forked.

A start of Python with these imports takes seconds. They must not start threads or create groups: a fork would lose them.
"""

import gc

import torch._dynamo
import torch._functorch.aot_autograd
import torch._inductor.compile_fx
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401

import titanlite.tools.check
import titanlite.tools.checkpoint
import titanlite.tools.data
import titanlite.tools.export_hf
import titanlite.tools.export_torch
import titanlite.tools.generate
import titanlite.tools.import_hf
import titanlite.tools.replay
import titanlite.tools.verify
import titanlite.train  # noqa: F401
from tests import disturbed

disturbed.install()
gc.freeze()  # the garbage collector leaves out what is imported: it took a tenth of all time, and copied pages that forks share
