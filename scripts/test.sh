#!/usr/bin/env bash
# Run the tests in two parts: first those that need no engine, two at a time; then those with real engines, one at a time, since an
# engine uses every core. Arguments go to both; a part in which nothing is chosen passes.
#   scripts/test.sh [-m MARKS] [pytest arguments]
set -uo pipefail

marks="not slow"
if [[ ${1:-} == -m ]]; then
    marks=$2
    shift 2
fi
python=${KVPOOL_VENV:-.venv}/bin/python
chosen=0 status=0

part() { # part MARKS pytest-arguments...
    local part_marks=$1 result
    shift
    "$python" -m pytest -m "$part_marks${marks:+ and ($marks)}" "$@"
    result=$?
    ((result == 5)) && return  # nothing chosen
    chosen=1
    ((result == 0)) || status=$result
}

part "not engine" -n "${KVPOOL_TEST_PROCESSES:-2}" --dist loadfile "$@"
part "engine" "$@"
((chosen)) || { echo "test: nothing was chosen" >&2; exit 5; }
exit "$status"
