"""The types of the schema's values, with bounds: every number has a smallest and a largest value."""

import math
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

# The largest numbers are far above what any run has, and far below what overflows a counter or a timer somewhere.
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


def _zero_or_normal(value: float) -> float:
    if 0 < value < SMALLEST:
        raise PydanticCustomError("too_small", f"Input should be 0 or at least {SMALLEST:g}")
    return value


def _large_or_infinite(value: float) -> float:
    if LARGEST < value < math.inf:
        raise PydanticCustomError("too_large", f"Input should be at most {LARGEST:g}, or inf")
    return value


Norm = Annotated[float, Field(ge=SMALLEST), AfterValidator(_large_or_infinite)]
Positive = Annotated[float, Field(ge=SMALLEST, le=LARGEST, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, le=LARGEST, allow_inf_nan=False), AfterValidator(_zero_or_normal)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False), AfterValidator(_zero_or_normal)]
Beta = Annotated[float, Field(ge=0.0, le=1 - 1e-6, allow_inf_nan=False), AfterValidator(_zero_or_normal)]  # 1 - it too
Rate = Annotated[float, Field(ge=1e-20, le=LARGEST, allow_inf_nan=False)]  # so small that nothing is learnt, for measurements
Epsilon = Annotated[float, Field(ge=1e-30, le=LARGEST, allow_inf_nan=False)]  # added, never multiplied
NO_NUL = r"^[^\x00]*$"  # which no path holds
Name = Annotated[str, Field(min_length=1, max_length=1000, pattern=NO_NUL)]
Text = Annotated[str, Field(max_length=1000, pattern=NO_NUL)]
Minutes = Annotated[float, Field(ge=0.0, le=10_000_000.0, allow_inf_nan=False), AfterValidator(_zero_or_normal)]
Reshard = Literal["default", "always", "never"] | Annotated[int, Field(ge=2, le=2**20)]
