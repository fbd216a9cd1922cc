"""The types of the schema's values, with bounds: every number has a smallest and a largest value."""

from typing import Annotated, Literal

from pydantic import Field

# The largest numbers are far above what any run has, and far below what overflows a counter or a timer somewhere.
MOST_STEPS, MOST_BATCH, LONGEST_SECONDS, LARGEST = 10**10, 2**24, 30 * 86_400, 1e30
Count = Annotated[int, Field(ge=1, le=2**20)]
Batch = Annotated[int, Field(ge=1, le=MOST_BATCH)]
Steps = Annotated[int, Field(ge=1, le=MOST_STEPS)]
StepsOrNone = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Seconds = Annotated[int, Field(ge=1, le=LONGEST_SECONDS)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0.0, le=LARGEST, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, le=LARGEST, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)]
NO_NUL = r"^[^\x00]*$"  # which no path holds
Name = Annotated[str, Field(min_length=1, max_length=1000, pattern=NO_NUL)]
Text = Annotated[str, Field(max_length=1000, pattern=NO_NUL)]
Minutes = Annotated[float, Field(ge=0.0, le=10_000_000.0, allow_inf_nan=False)]
Reshard = Literal["default", "always", "never"] | Annotated[int, Field(ge=2, le=2**20)]
