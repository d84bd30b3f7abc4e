"""Measurements. `python -m dsv4 bench` runs those of the engine; every family gives a list of records."""
