"""Attacks on the package: what a user, a machine or an adversary may do to it, and what it owes.

Bad input owes one line and exit status 2; a failing machine, a job that goes on or ends with a word
and leaves nothing running; an arbitrary plan, the plain model's loss.
"""
