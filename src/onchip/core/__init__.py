"""Helpers that ops and commands share: the choice of a backend, and what this machine has to run on."""
