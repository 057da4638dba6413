# What scripts/test-numa runs inside the machine with two memory nodes: tests, then the commands
# that a user of such a node runs, with what they print.
set -eu
python=.venv/bin/python
say() { printf '\n$ %s\n' "$*"; "$@"; }
say numactl --hardware
say $python -m multistage probe
say $python -m multistage probe numa:1 --sizes 64KiB,1MiB --no-progress
say numactl --membind=1 $python -m multistage probe numa:0 --sizes 64KiB,1MiB --no-progress
status=0
$python -m pytest -q -p no:cacheprovider -n0 --timeout=900 -rs --basetemp="$TMPDIR/pytest" \
    tests/backends/test_two_nodes.py tests/backends/test_numa.py tests/backends/test_nodes.py \
    tests/support/test_free_memory.py || status=$?
exit $status
