"""Runs that go on after the process that had them has died."""
