"""The types of the schema's values, with bounds: every number has a smallest and a largest value."""

import math
import os
import re
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

# The largest numbers are far above what any run has, and far below what overflows a counter or a timer somewhere.
MOST_LOCAL_RANKS = max(64, 4 * (os.cpu_count() or 1))  # processes that a command starts on this machine
MOST_STEPS, MOST_BATCH, LONGEST_SECONDS = 10**10, 2**24, 30 * 86_400
Count = Annotated[int, Field(ge=1, le=2**20)]
Batch = Annotated[int, Field(ge=1, le=MOST_BATCH)]
Steps = Annotated[int, Field(ge=1, le=MOST_STEPS)]
StepsOrNone = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Seconds = Annotated[int, Field(ge=1, le=LONGEST_SECONDS)]
# float32 and bfloat16 have normal numbers from 1.2e-38 to 3.4e38. Factors are multiplied with each other (lr with weight_decay
# and min_lr_factor, divided by warmup_steps) and with gradients, whose squares are summed: within these bounds, none of that is
# infinite, or 0 where its factors are not.
SMALLEST, LARGEST = 1e-9, 1e9
LOST = "float32"  # the type of pydantic's error for a number that float32 loses


def in_float32(least: float = SMALLEST, most: float = LARGEST, also: float | None = None) -> AfterValidator:
    """Refuses values that float32 arithmetic loses. also: a value outside the bounds that has a meaning of its own."""

    def check(value: float) -> float:
        if value != also and not least <= value <= most:
            more = "" if also is None else f"{also:g}, or "
            raise PydanticCustomError(LOST, f"Input should be {more}from {least:g} to {most:g}")
        return value

    return AfterValidator(check)


Positive = Annotated[float, Field(gt=0.0, le=LARGEST, allow_inf_nan=False), in_float32()]
NonNegative = Annotated[float, Field(ge=0.0, le=LARGEST, allow_inf_nan=False), in_float32(also=0.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False), in_float32(also=0.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False), in_float32(most=1 - 1e-6, also=0.0)]  # 1 - beta is used too
Rate = Annotated[float, Field(gt=0.0, le=LARGEST, allow_inf_nan=False), in_float32(1e-20)]  # 1e-20: nothing is learned
Epsilon = Annotated[float, Field(gt=0.0, le=LARGEST, allow_inf_nan=False), in_float32(1e-30)]  # added, never multiplied
Norm = Annotated[float, Field(gt=0.0), in_float32(also=math.inf)]
Minutes = Annotated[float, Field(ge=0.0, le=10_000_000.0, allow_inf_nan=False), in_float32(also=0.0)]
NO_NUL = r"^[^\x00]*$"  # which no path holds
Name = Annotated[str, Field(min_length=1, max_length=1000, pattern=NO_NUL)]
Text = Annotated[str, Field(max_length=1000, pattern=NO_NUL)]


PART = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")  # "package.module:name"


def _of_a_part(name: str) -> str:
    if not PART.fullmatch(name):
        raise PydanticCustomError("not_a_part", 'Input should be "package.module:name", a part of your own')
    return name


OwnPart = Annotated[str, Field(max_length=1000, pattern=NO_NUL), AfterValidator(_of_a_part)]  # of titanlite/interfaces.py
