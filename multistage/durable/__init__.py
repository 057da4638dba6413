"""Durable runs: a folder that holds states and the progress of the reverse sweep.

Reading order: `records` and `headers` (the bytes of a file), `folder` (whose it is and how
files appear in it), `store` (the slow tier), `journal` (what a folder holds), `adjoints` and
`agreement` (what is written on the way back, and of several ranks), `run`, `status` (for people).
"""
