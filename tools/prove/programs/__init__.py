"""One program per probe and contestant. A probe that a contestant has no feature for is in its NOT_APPLICABLE."""
