"""The memory allocator of a run, the same for every contestant. run_train.sh sets "keep" on CPUs, "expandable" on GPUs.

On a CPU, glibc returns large blocks to the kernel when they are freed. The kernel clears and maps every page of a new block at
its first touch: at every step, for every large temporary. "keep" and "tcmalloc" keep freed blocks.
"""

import glob

ALLOCATORS: dict[str, dict[str, str]] = {
    "default": {},
    # glibc's malloc: blocks up to 4 GiB come from the heap instead of mmap, and the heap never shrinks (mallopt(3))
    "keep": {
        "MALLOC_MMAP_THRESHOLD_": str(2**32),
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
        "MALLOC_TOP_PAD_": str(2**26),
    },
    # PyTorch's on GPUs: blocks of any size consist of pages, so that memory freed from blocks of other sizes can be reused
    "expandable": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    "tcmalloc": {"LD_PRELOAD": "libtcmalloc_minimal.so.4"},
}
_PLACES = ("/usr/lib/*/", "/usr/lib64/", "/usr/lib/", "/usr/local/lib/")


def environment(name: str) -> dict[str, str]:
    """The variables of an allocator. Raises FileNotFoundError if its library is not installed."""
    found = dict(ALLOCATORS[name])
    if library := found.get("LD_PRELOAD"):
        paths = [path for place in _PLACES for path in sorted(glob.glob(place + library))]
        if not paths:
            raise FileNotFoundError(f"--allocator {name}: no {library} in {', '.join(_PLACES)}; install libtcmalloc-minimal4")
        found["LD_PRELOAD"] = paths[0]
    return found
