#!/usr/bin/env bash
# Build and run the drivers of this folder: the kernels and the suffix index under AddressSanitizer and
# UndefinedBehaviorSanitizer, the thread team and the step program under ThreadSanitizer. Any finding ends with a report and a status that is not 0.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

build() { # name, sanitizers, target
  cmake -S . -B "build/sanitize-$1" -G Ninja -DTRIBLADE_SANITIZE="$2" -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null
  cmake --build "build/sanitize-$1" --target "$3"
}

build address address,undefined kernels_test
build address address,undefined suffix_test
build thread thread team_test
export UBSAN_OPTIONS=print_stacktrace=1
build/sanitize-address/kernels_test
build/sanitize-address/suffix_test
build/sanitize-thread/team_test
