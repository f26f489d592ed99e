"""Runs that belong to nobody's connection.

A run is asked for, waits its turn, is worked on by one worker at a time, and goes on after that worker has died. What
is kept of it stands in stores, whose ports are declared here.
"""
