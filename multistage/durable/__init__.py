"""Durable runs: a folder that holds states and the progress of the reverse sweep.

Reading order: `records` (the bytes of a file), `folder` (whose it is and how
files appear in it), `store` (the slow tier), `run` (the journal), `status`
(what a folder holds, for people).
"""
